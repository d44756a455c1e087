"""One node's side of a job on several nodes that may restart: runs the attempts that ``leader`` orders.

The launchers of the nodes send each other JSON messages, after the proof of the job secret; the ranks have the hub.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, Callable, NoReturn

from npu_device._src.cluster import frames, handshake
from npu_device._src.cluster.rank_errors import RESUMABLE
from npu_device._src.cluster.time_limits import (
    NODE_CONNECT_SECONDS,
    NODE_PAUSE_SECONDS,
    NODE_SILENT_SECONDS,
)
from npu_device._src.version import __version__
from npu_device.launch import ledger
from npu_device.launch.attempt import FAILED, Attempt, Launch, Meeting, Outcome, master_port
from npu_device.launch.failures import Failure
from npu_device.launch.supervisor import Stop

_MOST = 1e10  # numbers, and times in seconds since the epoch
_FORMS = {"int": int, "float": float, "str": str, "bool": bool, "str | None": (str, type(None))}
_FAILURE = {name: _FORMS[kind] for name, kind in Failure.__annotations__.items()}
_FIELDS: dict[str, dict[str, Any]] = {
    # to node 0
    "hello": {"node": int, "nproc": int, "most": int, "version": str, "count": int, "nodes": [int]},
    "failed": {"what": str},
    "preempted": {},
    "interrupted": {"signal": int},
    "outcome": {
        "code": int,
        "interrupted": bool,
        "preempted": bool,
        "failure": (_FAILURE, type(None)),
    },
    # of node 0
    "plan": {"count": int, "nodes": [int], "job_id": str, "port": int},
    "stop": {"why": str},
    "say": {"text": str},
    "over": {"code": int, "text": str},
    "leave": {"code": int, "text": str},
    "alive": {},
}
"""The fields that a message of each kind must have, and their forms."""
_OF_NODES = b" nodes"  # part of what both prove, so that ranks and nodes don't take each other for their own kind


class NodeLeavesError(SystemExit):
    """The npurun of this node ends, and the job continues when it is started again, or without it."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(exit_code)
        self.exit_code = exit_code


class Link:
    """One connection, after both sides have proved the secret."""

    def __init__(self, line: handshake.TimedConnection) -> None:
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
                fields = _FIELDS.get(str(message.get("do")))
                # What a message holds is used unchecked.
                if fields is None or not all(
                    _fits(message.get(name), form) for name, form in fields.items()
                ):
                    break
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


def _fits(value: Any, form: Any) -> bool:
    """Return whether a value is of a type, of one of several forms, a list of one, or has exactly some fields."""
    if isinstance(form, tuple):
        return any(_fits(value, each) for each in form)
    if isinstance(form, list):
        return isinstance(value, list) and all(_fits(each, form[0]) for each in value)
    if isinstance(form, dict):
        return (
            isinstance(value, dict)
            and value.keys() == form.keys()
            and all(_fits(value[k], form[k]) for k in form)
        )
    if form in (int, float) and type(value) in (int, form):
        return abs(value) < _MOST  # nor NaN
    return type(value) is form


def serve(listener: socket.socket, secret: bytes, joined: Callable[[Link], None]) -> None:
    """Let other nodes connect to node 0 until the listener is shut down; call ``joined`` in a thread for each."""
    serving = listener, secret + _OF_NODES, lambda line, _: joined(Link(line))
    threading.Thread(
        target=handshake.serve, args=serving, name="npurun-accept", daemon=True
    ).start()


class Member:
    """The launcher of a node, led by the one of node 0; it ends with SystemExit."""

    def __init__(self, launch: Launch, secret: bytes, leader: str) -> None:
        self._launch = launch
        self._options = launch.options
        self._say = launch.console.say
        self._secret = secret
        self._leader = leader, master_port(launch.options)
        self._link: Link | None = None
        self._nodes = tuple(
            launch.starter.nodes or range(launch.options.nnodes)
        )  # of the newest attempt
        self._count = launch.starter.count  # of the next attempt, as far as this node knows
        self._running: int | None = None
        self._ending: dict[str, Any] | None = None  # the leader's last message
        self._outcome = Outcome(0)  # of the newest attempt

    def run(self) -> NoReturn:
        try:
            while True:
                self._attempt(self._next())
        finally:
            if self._link is not None:
                self._link.close()

    def _next(self) -> Meeting:
        """Wait for the order to run an attempt."""
        while self._ending is None or not self._launch.events.empty():
            if self._ending is None and (self._link is None or self._link.is_lost):
                self._connect()
            event = self._event(NODE_SILENT_SECONDS)
            link = self._link
            if (
                event is None
                and link is not None
                and time.monotonic() - link.heard > NODE_SILENT_SECONDS
            ):
                self._say(
                    f"node 0 has said nothing for {NODE_SILENT_SECONDS:g} s: its npurun is stopped, or its host hangs"
                )
                link.close()
                link.is_lost = True
            if not isinstance(event, dict):
                continue
            if event["do"] == "plan":
                nodes = tuple(event["nodes"])
                change = ledger.change(self._nodes, nodes, self._options.nproc_per_node)
                if change:
                    self._say(change)
                self._nodes, self._count = nodes, event["count"] + 1
                return Meeting(event["job_id"], event["port"], None, None, nodes, event["count"])
            self._say(event["text"])
        if self._ending["text"]:
            self._say(self._ending["text"])
        ends = NodeLeavesError if self._ending["do"] == "leave" else SystemExit
        raise ends(self._ending["code"])

    def _event(self, seconds: float) -> Any:
        """Return the next event, or None if there is none for some time; end at a signal."""
        try:
            event = self._launch.events.get(timeout=seconds)
        except queue.Empty:
            return None
        if isinstance(event, int):
            is_request = event == self._options.preempt_signal
            stopped = self._outcome.interrupted or (is_request and self._outcome.code == RESUMABLE)
            code = self._outcome.code if stopped else 128 + event
            if is_request and self._options.outlives_preemption:
                raise NodeLeavesError(code)
            if self._link is not None:
                self._link.send("interrupted", signal=event)
            raise SystemExit(code)
        return event

    def _attempt(self, place: Meeting) -> None:
        link = self._link
        assert link is not None
        if link.is_lost:
            return
        outcome = self._outcome = Attempt(
            self._launch, place, lambda kind, what: link.send(kind, what=what)
        ).run()
        self._running = None
        link.send("outcome", **asdict(outcome))
        if outcome.preempted and self._options.outlives_preemption and self._options.node_rank > 0:
            raise NodeLeavesError(outcome.code)

    def _connect(self) -> None:
        if self._outcome.interrupted:
            raise SystemExit(self._outcome.code)
        seconds = self._options.rejoin_timeout
        if self._link is not None:
            self._link.close()
            self._link = None
            self._say(
                f"lost the connection to node 0: trying to reach it again for {seconds:g} s (--rejoin-timeout)"
            )
        deadline = time.monotonic() + seconds
        while self._link is None:
            try:
                self._link = Link(
                    handshake.reach(*self._leader, NODE_CONNECT_SECONDS, self._secret + _OF_NODES)
                )
            except OSError as error:
                if time.monotonic() >= deadline:
                    host, port = self._leader
                    self._say(
                        f"node 0 could not be reached at {host}, port {port}, within {seconds:g} s "
                        f"(--rejoin-timeout): {error}.\n"
                        "What to do: look at the output of npurun there; compare --master-addr, --master-port and the "
                        "secret; let the cluster start npurun there again."
                    )
                    raise SystemExit(FAILED) from None
                self._event(NODE_PAUSE_SECONDS)
        options = self._options
        fields = {
            "node": options.node_rank,
            "nproc": options.nproc_per_node,
            "most": options.nnodes,
        }
        self._link.send(
            "hello", **fields, version=__version__, count=self._count, nodes=self._nodes
        )
        threading.Thread(
            target=self._receive, args=(self._link,), name="npurun-member", daemon=True
        ).start()

    def _receive(self, link: Link) -> None:
        for message in link.messages():
            if message["do"] == "stop":
                self._launch.events.put(Stop(message["why"], self._running))
            elif message["do"] in ("over", "leave"):
                self._ending = message
                self._launch.events.put(
                    Stop("node 0 has ended the part of the job on this node", self._running)
                )
            elif message["do"] != "alive":
                if message["do"] == "plan":
                    self._running = message["count"]
                self._launch.events.put(message)
        self._launch.events.put(Stop("lost the connection to node 0", self._running))
