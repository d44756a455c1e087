"""The ranks' own connections and the TCP engine's, with any data: an error or nothing, never a hang, or much memory."""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from fuzzing import GREETING, SECRET, SOON, VALUES, both_met, changed, ends, given, hub_of_two, pair, send, st, streams

from npu_device._src.cluster import frames, handshake
from npu_device._src.cluster.health import Health
from npu_device._src.cluster.peers import Peers
from npu_device._src.collectives.engines.host import sockets

pytestmark = pytest.mark.xdist_group("waiting")


@pytest.fixture()
def rank() -> Iterator[tuple[Peers, int, bytes]]:
    """Rank 0 of two: its connections, its port, and what a rank must know to connect."""
    hub = hub_of_two(stays=False)
    met = both_met(hub)
    cluster, channel = met[0]
    channel.listen(lambda push: None, lambda reason: None)
    peers = Peers(cluster, Health(cluster, channel), SECRET)
    peers.open(channel)
    port, token = channel.get("peers/0", 1).split()
    yield peers, int(port), SECRET + token.encode()
    peers.close()
    for _, each in met:
        each.close()
    hub.end()


def _connect(port: int, secret: bytes, **said: Any) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), SOON)
    try:
        handshake.authenticate(handshake.TimedConnection(connection), secret, **said)
    except BaseException:
        connection.close()
        raise
    return connection


def _require_work(peers: Peers, port: int, secret: bytes) -> None:
    """Check that another rank can still connect."""
    began = time.monotonic()
    with _connect(port, secret, rank=1, number=7) as theirs:
        connection = peers.accept(1, 7, lambda: time.monotonic() > began + SOON)
        assert connection is not None
        connection.close()
        assert theirs.recv(1) == b""


@given(streams({**GREETING, "rank": 1, "number": 2}, {"proof": "0"}))
def test_a_stranger_at_a_ranks_port(rank: tuple[Peers, int, bytes], pieces: list[bytes]) -> None:
    _, port, _ = rank
    with socket.create_connection(("127.0.0.1", port), SOON) as stranger:
        send(stranger, pieces)
        assert len(ends(stranger)) < 1000


@given(changed({"rank": 1, "number": 2}) | st.dictionaries(st.sampled_from(["rank", "number", "x"]), VALUES))
def test_a_process_with_the_secret_says_anything(rank: tuple[Peers, int, bytes], said: dict[str, Any]) -> None:
    with contextlib.suppress(handshake.AttemptFailedError):
        _connect(*rank[1:], **said).close()
    _require_work(*rank)


def test_what_a_rank_says_cannot_be_exchanged_on_the_way(rank: tuple[Peers, int, bytes]) -> None:
    """The proof covers the rank, and the number of the connection."""
    _, port, secret = rank
    for said in ({"rank": 1, "number": 8}, {"rank": 0, "number": 7}):
        with socket.create_connection(("127.0.0.1", port), SOON) as connection:
            line = handshake.TimedConnection(connection)
            line.send({**said, "npu_device": frames.PROTOCOL, "nonce": "mine"})
            nonce = line.receive(SOON, silent="silent", closed="closed")["nonce"]
            line.send({"proof": frames.proof(secret, "client", "mine", nonce, {"rank": 1, "number": 7})})
            with pytest.raises(handshake.AttemptFailedError, match="closed"):
                line.receive(SOON, silent="silent", closed="closed")
    _require_work(*rank)


_MESSAGES = st.lists(st.binary(min_size=1, max_size=20), max_size=3)


@given(_MESSAGES, st.lists(st.binary(max_size=40), max_size=3), st.integers(0, 30))
def test_any_bytes_in_the_tcp_engine(expected: list[bytes], added: list[bytes], cut: int) -> None:
    """A message is taken only whole, with the length that is expected; the rest is an error."""
    with pair() as (theirs, mine):
        mine.setblocking(False)
        wire = sockets.Wire(sockets.Busy(), None, 1, False)  # type: ignore[arg-type]
        wire.connection = mine
        space = [np.zeros(len(message), np.uint8) for message in expected]
        waiting = [wire.add(each) for each in space]
        stream = b"".join(struct.pack("<Q", len(message)) + message for message in expected) + b"".join(added)
        stream = stream[cut:]
        theirs.sendall(stream)
        theirs.close()
        until = time.monotonic() + SOON
        try:
            while wire.lost is None and wire.messages and time.monotonic() < until:
                wire.advance()
        except AssertionError as error:
            assert "rank 1 has sent" in str(error) and cut
        else:
            assert not wire.messages or wire.lost is not None
        if not cut:
            assert all(message.ended for message in waiting)
            assert [each.tobytes() for each in space] == expected
