"""The connections between the launchers of several nodes: JSON messages, and the proof of the job's secret first.

They carry the messages of ``leader`` and ``member``; the ranks have the hub.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

from npu_device._src.cluster import frames

_CONNECT_SECONDS = 3.0
_PROOF_SECONDS = 5.0


class Link:
    """One connection, after both sides have proved the secret.

    Attributes:
        is_lost: the other side has closed the connection.
    """

    def __init__(self, connection: socket.socket, reader: frames.Reader) -> None:
        self.is_lost = False
        self._connection = connection
        self._reader = reader
        self._sending = threading.Lock()

    def send(self, message: dict[str, Any]) -> None:
        """Send a message. If the connection is lost, ``messages`` ends."""
        with self._sending, contextlib.suppress(OSError):
            self._connection.sendall(frames.encode(message))

    def messages(self) -> Iterator[dict[str, Any]]:
        """Iterate over the messages until the other side has closed the connection, or breaks the protocol.

        Then this side closes it, too: only half of it may be lost.
        """
        with contextlib.suppress(OSError, frames.FrameError):
            while True:
                message = self._reader.next()
                if message is not None:
                    yield message
                    continue
                data = self._connection.recv(1 << 16)
                if not data:
                    break
                self._reader.add(data)
        self.is_lost = True
        self.close()

    def end(self) -> None:
        """Announce that no message follows."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Close the connection, from any thread."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()


def connect(host: str, port: int, secret: bytes) -> Link:
    """Connect to node 0.

    Raises:
        OSError: it can't be reached, or is another program or job.
    """
    connection = socket.create_connection((host, port), _CONNECT_SECONDS)
    try:
        if connection.getsockname() == connection.getpeername():
            raise ConnectionRefusedError("nothing listens there")  # a port of this host can connect to itself
        reader = frames.Reader(frames.LIMIT_BEFORE_PROOF)
        until, mine = time.monotonic() + _PROOF_SECONDS, frames.nonce()
        _send(connection, {"npurun": frames.PROTOCOL, "nonce": mine})
        theirs = str(_receive(connection, reader, until).get("nonce"))
        _send(connection, {"proof": frames.proof(secret, "node", mine, theirs)})
        proof = _receive(connection, reader, until).get("proof")
        if not frames.is_proof(proof, frames.proof(secret, "leader", mine, theirs)):
            raise ConnectionError("it can't prove that it knows the job's secret")
    except BaseException:
        connection.close()
        raise
    return _link(connection, reader)


def accept(connection: socket.socket, secret: bytes) -> Link:
    """Let another node prove the secret, on node 0. Closes the connection if it can't.

    Raises:
        OSError: it isn't a node of this job.
    """
    try:
        reader = frames.Reader(frames.LIMIT_BEFORE_PROOF)
        until, mine = time.monotonic() + _PROOF_SECONDS, frames.nonce()
        greeting = _receive(connection, reader, until)
        theirs = str(greeting.get("nonce"))
        if greeting.get("npurun") != frames.PROTOCOL:
            raise ConnectionError("another program")
        _send(connection, {"nonce": mine})
        proof = _receive(connection, reader, until).get("proof")
        if not frames.is_proof(proof, frames.proof(secret, "node", theirs, mine)):
            raise ConnectionError("it can't prove that it knows the job's secret")
        _send(connection, {"proof": frames.proof(secret, "leader", theirs, mine)})
    except BaseException:
        connection.close()
        raise
    return _link(connection, reader)


def _link(connection: socket.socket, reader: frames.Reader) -> Link:
    connection.settimeout(None)
    frames.keep_alive(connection)
    reader.limit = frames.LIMIT
    return Link(connection, reader)


def _send(connection: socket.socket, message: dict[str, Any]) -> None:
    connection.sendall(frames.encode(message))


def _receive(connection: socket.socket, reader: frames.Reader, until: float) -> dict[str, Any]:
    """Return the next message.

    Raises:
        OSError: none came in time.
    """
    while True:
        try:
            message = reader.next()
        except frames.FrameError as error:
            raise ConnectionError(f"another program answers: {error}") from None
        if message is not None:
            return message
        connection.settimeout(max(0.01, until - time.monotonic()))
        data = connection.recv(1 << 16)
        if not data:
            raise ConnectionError("the connection was closed: another program, or a job with another secret")
        reader.add(data)
