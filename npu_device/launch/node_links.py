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
from npu_device.launch.failures import Failure

_MOST = 1e10  # numbers, and times in seconds since the epoch
_FORMS = {"int": int, "float": float, "str": str, "bool": bool, "str | None": (str, type(None))}
_FAILURE = {name: _FORMS[kind] for name, kind in Failure.__annotations__.items()}
_FIELDS: dict[str, dict[str, Any]] = {
    # to node 0
    "hello": {"node": int, "nproc": int, "most": int, "version": str, "count": int, "nodes": [int]},
    "failed": {"what": str},
    "preempted": {},
    "interrupted": {"signal": int},
    "outcome": {"code": int, "interrupted": bool, "preempted": bool, "failure": (_FAILURE, type(None))},
    # of node 0
    "plan": {"count": int, "nodes": [int], "job_id": str, "port": int},
    "stop": {"why": str},
    "say": {"text": str},
    "over": {"code": int, "text": str},
    "alive": {},
}
"""The fields that a message of each kind must have, and their forms."""
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
                _check(message)
                yield message
        self.is_lost = True
        self.close()

    def end(self, do: str, **fields: Any) -> None:
        """Send the last message."""
        self.send(do, **fields)
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()


def _check(message: dict[str, Any]) -> None:
    """Raise an error if a message isn't one of a node: what it holds is used unchecked."""
    fields = _FIELDS.get(str(message.get("do")))
    if fields is None or not all(_fits(message.get(name), form) for name, form in fields.items()):
        raise frames.FrameError("no message of a node")


def _fits(value: Any, form: Any) -> bool:
    """Return whether a value is of a type, of one of several forms, a list of one, or has exactly some fields."""
    if isinstance(form, tuple):
        return any(_fits(value, each) for each in form)
    if isinstance(form, list):
        return isinstance(value, list) and all(_fits(each, form[0]) for each in value)
    if isinstance(form, dict):
        return isinstance(value, dict) and value.keys() == form.keys() and all(_fits(value[k], form[k]) for k in form)
    if form in (int, float) and type(value) in (int, form):
        return abs(value) < _MOST  # nor NaN
    return type(value) is form


def connect(host: str, port: int, secret: bytes) -> Link:
    return Link(handshake.reach(host, port, NODE_CONNECT_SECONDS, secret + _OF_NODES))


def serve(listener: socket.socket, secret: bytes, joined: Callable[[Link], None]) -> None:
    """Let other nodes connect to node 0 until the listener is shut down; call ``joined`` in a thread for each."""
    serving = listener, secret + _OF_NODES, lambda line, _: joined(Link(line))
    threading.Thread(target=handshake.serve, args=serving, name="npurun-accept", daemon=True).start()
