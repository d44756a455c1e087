"""The handshake of a hub or a rank with its client, message by message, without a socket."""

from __future__ import annotations

from typing import Any

import pytest

from npu_device._src.cluster import frames
from npu_device._src.cluster.server_handshake import ServerHandshake, UnprovedError

SECRET = b"the secret"
SAID = {"rank": 1, "stream": 7}


def greet(handshake: ServerHandshake, **changes: Any) -> str:
    """Greet as a client; return the nonce that it gets."""
    reply = handshake.answer({**SAID, "npu_device": frames.PROTOCOL, "nonce": "client", **changes})
    assert list(reply) == ["nonce"], "before the client's proof, it learns nothing else"
    return str(reply["nonce"])


def proof(
    nonce: str, side: str = "client", secret: bytes = SECRET, said: dict[str, int] = SAID
) -> str:
    return frames.proof(secret, side, "client", nonce, said)


def test_both_sides_prove_the_secret_and_what_the_client_has_said() -> None:
    handshake = ServerHandshake(SECRET)
    nonce = greet(handshake)
    assert not handshake.is_proved
    assert handshake.answer({"proof": proof(nonce)}) == {"proof": proof(nonce, "hub")}
    assert (handshake.is_proved, handshake.said) == (True, SAID)


def test_a_proof_is_for_one_handshake_one_secret_and_what_was_said() -> None:
    recorded = proof(greet(ServerHandshake(SECRET)))
    nonces = []
    for wrong in (
        lambda nonce: recorded,
        lambda nonce: proof(nonce, secret=b"another secret"),
        lambda nonce: proof(nonce, said={"rank": 0, "stream": 7}),
        lambda nonce: proof(nonce, "hub"),
        lambda nonce: "\ud800",  # JSON allows half a surrogate pair
        lambda nonce: None,
    ):
        handshake = ServerHandshake(SECRET)
        nonces.append(greet(handshake))
        with pytest.raises(UnprovedError, match="the job secret"):
            handshake.answer({"proof": wrong(nonces[-1])})
        assert not handshake.is_proved
    assert len(set(nonces)) == len(nonces)


@pytest.mark.parametrize("changes", [{"nonce": 7}, {"nonce": None}, {"npu_device": "2"}])
def test_what_is_no_greeting_is_another_protocol(changes: dict[str, Any]) -> None:
    handshake = ServerHandshake(SECRET)
    with pytest.raises(frames.FrameError):
        greet(handshake, **changes)
    assert not handshake.is_proved
