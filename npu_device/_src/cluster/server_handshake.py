"""The side of the handshake that is connected to: the hub, or another rank. Knows no sockets, and imports little."""

from __future__ import annotations

import secrets

from npu_device._src.cluster import frames
from npu_device._src.cluster.frames import Message


class UnprovedError(Exception):
    """The client doesn't know the job secret."""


class ServerHandshake:
    """One client's handshake: its greeting with a nonce, then its proof, which covers all that the greeting says.

    Attributes:
        is_proved: the client has proved that it knows the job secret, so that the handshake is over.
        said: what the greeting holds besides the nonce; only to be trusted once it is proved.
    """

    def __init__(self, secret: bytes) -> None:
        self.is_proved = False
        self.said: Message = {}
        self._secret = secret
        self._client_nonce: str | None = None
        # Never used before, so that a recorded proof can't be replayed.
        self._own_nonce = secrets.token_hex()

    def answer(self, message: Message) -> Message:
        """Return the reply to a message of the client.

        Raises:
            FrameError: it isn't a greeting, which has to come first.
            UnprovedError: its proof is wrong.
        """
        if self._client_nonce is None:
            return self._greet(message)
        if not frames.is_proof(message.get("proof"), self._proof("client", self._client_nonce)):
            raise UnprovedError("no proof that it knows the job secret")
        self.is_proved = True
        return {"proof": self._proof("hub", self._client_nonce)}

    def _greet(self, greeting: Message) -> Message:
        said = dict(greeting)
        protocol = said.pop("npu_device", None)
        nonce = said.pop("nonce", None)
        # Any protocol number is accepted here, so that ranks with different versions get far enough to name the
        # mismatch.
        if not isinstance(protocol, int) or not isinstance(nonce, str):
            raise frames.FrameError("no greeting")
        self.said = said
        self._client_nonce = nonce
        return {"nonce": self._own_nonce}

    def _proof(self, side: str, client_nonce: str) -> str:
        return frames.proof(self._secret, side, client_nonce, self._own_nonce, self.said)
