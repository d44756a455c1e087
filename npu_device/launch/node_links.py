"""The connections between the launchers of several nodes: JSON messages, and the proof of the job secret first.

They carry the messages of ``leader`` and ``member``; the ranks have the hub.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any, Callable

from npu_device._src.cluster import frames, handshake
from npu_device._src.cluster.handshake import TimedConnection
from npu_device._src.cluster.time_limits import NODE_CONNECT_SECONDS

_OF_NODES = b" nodes"  # part of what both prove, so that ranks and nodes don't take each other for their own kind


class Link:
    """One connection, after both sides have proved the secret."""

    def __init__(self, line: TimedConnection) -> None:
        self.is_lost = False
        self.heard = time.monotonic()
        self._connection = line.connection
        self._connection.settimeout(None)
        self._reader = line.reader
        self._reader.limit = frames.LIMIT_FROM_RANK
        self._sending = threading.Lock()

    def send(self, do: str, **fields: Any) -> None:
        with self._sending, contextlib.suppress(OSError):
            self._connection.sendall(frames.encode({"do": do, **fields}))

    def messages(self) -> Iterator[dict[str, Any]]:
        """Yield messages until the other side closes, or breaks the protocol; then this side, as half may be lost."""
        with contextlib.suppress(OSError, frames.FrameError):
            for message in self._reader.messages(self._connection):
                self.heard = time.monotonic()
                yield message
        self.is_lost = True
        self.close()

    def end(self) -> None:
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()


def connect(host: str, port: int, secret: bytes) -> Link:
    return Link(handshake.reach(host, port, NODE_CONNECT_SECONDS, secret + _OF_NODES))


def serve(listener: socket.socket, secret: bytes, joined: Callable[[Link], None]) -> None:
    """Let other nodes connect to node 0 until the listener is shut down; call ``joined`` in a thread for each."""
    serving = listener, secret + _OF_NODES, lambda line, _: joined(Link(line))
    threading.Thread(target=handshake.serve, args=serving, name="npurun-accept", daemon=True).start()
