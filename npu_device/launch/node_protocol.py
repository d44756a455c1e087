"""What the npuruns of a job's nodes tell each other, and the connections that carry it: JSON messages, after the proof
of the job secret. The ranks have the hub. What node 0 orders is also an event of the launcher that gets it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Callable

from npu_device._src.cluster import frames, handshake, ports
from npu_device._src.cluster.time_limits import NODE_CONNECT_SECONDS
from npu_device._src.threads import start_thread
from npu_device.launch.failures import Failure

_OF_NODES = b" nodes"  # part of what both prove, so that ranks and nodes don't take each other for their own kind

# Messages to node 0


@dataclass(frozen=True)
class NodeHello:
    """The first message of a node. Its name and fields stay, so that other versions get an error that names them."""

    node: int
    nproc: int  # ranks per node
    most: int  # the number of nodes
    version: str
    count: int  # number of the next attempt, as far as the node knows
    nodes: Sequence[int]  # nodes of the newest attempt
    # Port where the node takes copies in memory. Other versions, whose difference is an error, have none.
    copies: int | None = None


@dataclass(frozen=True)
class RankFailed:
    what: str


@dataclass(frozen=True)
class NodePreempted:
    """The platform takes the node away. Its outcome follows, after the checkpoints of its ranks."""


@dataclass(frozen=True)
class JobInterrupted:
    """The node got a signal between two attempts."""

    signal: int


@dataclass(frozen=True)
class NodeOutcome:
    """The end of an attempt on one node."""

    # The exit code: 0 if every rank ended with 0; 75 if the ranks were asked to stop and can be resumed; 126 if a rank
    # can't be started; else the code of the first failed rank, or of the signal that stopped the launcher.
    code: int
    is_interrupted: bool = False
    is_preempted: bool = False  # the platform takes this node away
    failure: Failure | None = None  # the first failure


# Messages of node 0


@dataclass(frozen=True)
class AttemptPlan:
    """Node 0 lets an attempt begin."""

    count: int  # how often the job has been started again
    nodes: Sequence[int]  # the nodes of the attempt; the ranks are numbered in this order
    job_id: str  # name of the job, another one in each attempt, so that leftovers of an earlier one can't join
    port: int  # where the hub listens
    copies: Sequence[str] = ()  # where each node takes copies in memory: host and port
    saves_copies: bool = False  # its ranks write copies in memory to the disk


@dataclass(frozen=True)
class StopOrder:
    """The attempt has failed on another node, or without one."""

    why: str


@dataclass(frozen=True)
class Notice:
    """A message for the user."""

    text: str


@dataclass(frozen=True)
class JobEnd:
    """The job is over."""

    code: int
    text: str


@dataclass(frozen=True)
class NodeEnd(JobEnd):
    """The npurun of the node ends, and the job goes on."""


@dataclass(frozen=True)
class Alive:
    """Node 0 isn't frozen."""


_MESSAGES: dict[str, type[Any]] = {
    "hello": NodeHello,
    "failed": RankFailed,
    "preempted": NodePreempted,
    "interrupted": JobInterrupted,
    "outcome": NodeOutcome,
    "plan": AttemptPlan,
    "stop": StopOrder,
    "say": Notice,
    "over": JobEnd,
    "leave": NodeEnd,
    "alive": Alive,
}
"""The messages by their names on the wire."""
_NAMES = {message_type: name for name, message_type in _MESSAGES.items()}


class Link:
    """One connection, after both sides have proved the secret."""

    def __init__(self, line: handshake.TimedConnection) -> None:
        self.is_lost = False
        self.received_at = time.monotonic()  # when the newest message came
        self.connection = line.connection
        self.host = ports.plain(self.connection.getpeername()[0])
        # The handshake has a time limit; a connection between nodes may be silent for long.
        self.connection.settimeout(None)
        self._reader = line.reader
        self._reader.limit = frames.LIMIT_FROM_RANK
        self._sending = threading.Lock()

    def send(self, message: Any) -> None:
        frame = frames.encode({"do": _NAMES[type(message)], **dataclasses.asdict(message)})
        # The thread that reads notices that a connection is broken.
        with self._sending, contextlib.suppress(OSError):
            self.connection.sendall(frame)

    def messages(self) -> Iterator[Any]:
        """Yield messages until the other side closes, or breaks the protocol; then this side, as half may be lost."""
        with contextlib.suppress(OSError, *frames.WRONG_FORM):
            for fields in self._reader.messages(self.connection):
                self.received_at = time.monotonic()
                message_type = _MESSAGES[str(fields.get("do"))]
                yield frames.checked(message_type, fields, Failure=Failure)
        self.close()

    def end(self, message: Any) -> None:
        """Send the last message."""
        self.send(message)
        # The other side still reads what was sent before.
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self.is_lost = True
        frames.shut_down(self.connection)
        self.connection.close()


def reach(address: tuple[str, int], secret: bytes) -> Link:
    """Connect to node 0, or raise OSError."""
    return Link(handshake.reach(*address, NODE_CONNECT_SECONDS, secret + _OF_NODES))


def serve(listener: socket.socket, secret: bytes, joined: Callable[[Link], None]) -> None:
    """Let other nodes connect to node 0 until the listener is shut down; call ``joined`` in a thread for each."""
    serving = listener, secret + _OF_NODES, lambda line, _: joined(Link(line))
    start_thread("npurun-accept", handshake.serve, *serving)
