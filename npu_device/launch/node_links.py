"""The connections between the launchers of several nodes: JSON messages, and the proof of the job's secret first.

They carry the messages of ``leader`` and ``member``; the ranks have the hub.
"""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any, Callable

from npu_device._src.cluster import frames, handshake
from npu_device._src.cluster.handshake import TimedConnection

_CONNECT_SECONDS = 10.0
_OF_NODES = b" nodes"  # part of what both prove, so that ranks and nodes don't take each other for their own kind


_KINDS: dict[str, tuple[type, ...]] = {
    "bool": (bool,),
    "int": (int,),
    "float": (int, float),
    "str": (str,),
    "int | None": (int, type(None)),
    "str | None": (str, type(None)),
}


def fields_of(kind: type[Any], message: Mapping[str, Any], *others: str) -> dict[str, Any]:
    """Return the fields of a dataclass from a message, so that nothing of another type goes further.

    Args:
        kind: the dataclass, with fields of plain types.
        message: the fields by name.
        others: fields that the caller reads itself.

    Raises:
        LookupError, TypeError: a field is missing, or of another type.
    """
    values = {}
    for each in dataclasses.fields(kind):
        value = values[each.name] = message[each.name]
        if each.name not in others and type(value) not in _KINDS[str(each.type)]:
            raise TypeError(f"{each.name} is a {type(value).__name__}")
    return values


def numbers_of(value: Any) -> tuple[int, ...]:
    """Return a list of whole numbers.

    Raises:
        TypeError: it isn't.
    """
    if not isinstance(value, (list, tuple)) or not all(type(each) is int for each in value):
        raise TypeError("no list of whole numbers")
    return tuple(value)


class Link:
    """One connection, after both sides have proved the secret.

    Attributes:
        is_lost: the other side has closed the connection.
        heard: when the last message came, on the monotonic clock.
        greeting: what the other side said first, if it has connected to this one.
    """

    def __init__(self, line: TimedConnection, greeting: dict[str, Any] | None = None) -> None:
        self.is_lost = False
        self.heard = time.monotonic()
        self.greeting = greeting or {}
        self._connection = line.connection
        self._connection.settimeout(None)
        self._reader = line.reader
        self._reader.limit = frames.LIMIT_FROM_RANK
        self._sending = threading.Lock()

    def send(self, message: dict[str, Any]) -> None:
        """Send a message. If the connection is lost, ``messages`` ends."""
        with self._sending, contextlib.suppress(OSError):
            self._connection.sendall(frames.encode(message))

    def messages(self, seconds: float | None = None) -> Iterator[dict[str, Any]]:
        """Iterate over the messages until the other side has closed the connection, or breaks the protocol.

        Then this side closes it, too: only half of it may be lost.

        Args:
            seconds: how long to wait for each message; default without a limit.
        """
        self._connection.settimeout(seconds)
        with contextlib.suppress(OSError, frames.FrameError):
            for message in self._reader.messages(self._connection):
                self.heard = time.monotonic()
                yield message
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


def connect(host: str, port: int, secret: bytes, **greeting: Any) -> Link:
    """Connect to node 0, and send it a short greeting.

    Raises:
        OSError: it can't be reached, or is another program or job.
    """
    return Link(handshake.reach(host, port, _CONNECT_SECONDS, secret + _OF_NODES, **greeting))


def serve(listener: socket.socket, secret: bytes, joined: Callable[[Link], None]) -> None:
    """Let other nodes connect to node 0 until the listener is shut down; call ``joined`` in a thread for each."""
    serving = listener, secret + _OF_NODES, lambda line, greeting: joined(Link(line, greeting))
    threading.Thread(target=handshake.serve, args=serving, name="npurun-accept", daemon=True).start()
