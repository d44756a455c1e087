"""One node's side of a job on several nodes that may restart: runs the attempts that ``leader`` orders.

The launchers of the nodes send each other JSON messages, after the proof of the job secret; the ranks have the hub.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, Callable, NoReturn

from npu_device._src.cluster import frames, handshake, ports
from npu_device._src.cluster.frames import Message
from npu_device._src.cluster.rank_errors import RESUMABLE
from npu_device._src.cluster.time_limits import (
    NODE_CONNECT_SECONDS,
    NODE_PAUSE_SECONDS,
    NODE_SILENT_SECONDS,
)
from npu_device._src.version import __version__
from npu_device.launch import last_copy, ledger
from npu_device.launch.attempt import (
    FAILED,
    Attempt,
    AttemptObserver,
    Launch,
    NodeOutcome,
    Rendezvous,
    master_port,
)
from npu_device.launch.events import (
    AttemptOrdered,
    Handlers,
    SignalReceived,
    StopOrdered,
    TextReceived,
)
from npu_device.launch.failures import Failure
from npu_device.launch.neighbour import Neighbour

_LARGEST = 1e10  # numbers, and times in seconds since the epoch
# The form is found by the text of the annotation, which a dataclass keeps with postponed evaluation.
_FORMS = {"int": int, "float": float, "str": str, "bool": bool, "str | None": (str, type(None))}
_FAILURE = {name: _FORMS[annotation] for name, annotation in Failure.__annotations__.items()}
_FIELDS: dict[str, dict[str, Any]] = {
    # Messages to node 0
    "hello": {
        "node": int,
        "nproc": int,
        "most": int,
        "version": str,
        "count": int,
        "nodes": [int],
        # Other versions, whose difference is an error, have none.
        "copies": (int, type(None)),
    },
    "failed": {"what": str},
    "preempted": {},
    "interrupted": {"signal": int},
    "outcome": {
        "code": int,
        "interrupted": bool,
        "preempted": bool,
        "failure": (_FAILURE, type(None)),
    },
    # Messages of node 0
    "plan": {
        "count": int,
        "nodes": [int],
        "job_id": str,
        "port": int,
        "copies": [str],
        "saves_copies": bool,
    },
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
        self.received_at = time.monotonic()  # when the newest message came
        self.connection = line.connection
        self.host = ports.plain(self.connection.getpeername()[0])
        # The handshake has a time limit; a connection between nodes may be silent for long.
        self.connection.settimeout(None)
        self._reader = line.reader
        self._reader.limit = frames.LIMIT_FROM_RANK
        self._sending = threading.Lock()

    def send(self, do: str, **fields: Any) -> None:
        message = frames.encode({"do": do, **fields})
        # The thread that reads notices that a connection is broken.
        with self._sending, contextlib.suppress(OSError):
            self.connection.sendall(message)

    def messages(self) -> Iterator[Message]:
        """Yield messages until the other side closes, or breaks the protocol; then this side, as half may be lost."""
        with contextlib.suppress(OSError, frames.FrameError):
            for message in self._reader.messages(self.connection):
                self.received_at = time.monotonic()
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
        # The other side still reads what was sent before.
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)
        self.connection.close()


def _fits(field: Any, form: Any) -> bool:
    """Return True if a field is of a type, of one of several forms, a list of one, or has exactly some fields."""
    if isinstance(form, tuple):
        return any(_fits(field, alternative) for alternative in form)
    if isinstance(form, list):
        return isinstance(field, list) and all(_fits(member, form[0]) for member in field)
    if isinstance(form, dict):
        if not isinstance(field, dict) or field.keys() != form.keys():
            return False
        return all(_fits(field[name], form[name]) for name in form)
    # JSON writes a float without a fraction as an integer.
    if form in (int, float) and type(field) in (int, form):
        # Compared in this way, NaN is refused, too.
        return abs(field) < _LARGEST
    return type(field) is form


def serve(listener: socket.socket, secret: bytes, joined: Callable[[Link], None]) -> None:
    """Let other nodes connect to node 0 until the listener is shut down; call ``joined`` in a thread for each."""
    serving = listener, secret + _OF_NODES, lambda line, _: joined(Link(line))
    threading.Thread(
        target=handshake.serve, args=serving, name="npurun-accept", daemon=True
    ).start()


class _LeaderNotifier(AttemptObserver):
    """Tells node 0 at once what happens in an attempt."""

    def __init__(self, link: Link) -> None:
        self._link = link

    def on_failure(self, text: str) -> None:
        self._link.send("failed", what=text)

    def on_preemption(self) -> None:
        self._link.send("preempted")


class Member:
    """The launcher of a node, led by the one of node 0; it ends with SystemExit."""

    def __init__(self, launch: Launch, secret: bytes, leader: str, neighbour: Neighbour) -> None:
        self._launch = launch
        self._neighbour = neighbour
        self._options = launch.options
        self._say = launch.console.say
        self._secret = secret
        self._leader = (leader, master_port(launch.options))
        self._link: Link | None = None
        starter = launch.starter
        # The nodes of the newest attempt.
        self._nodes = tuple(starter.nodes or range(launch.options.nnodes))
        self._count = starter.count  # number of the next attempt, as far as this node knows
        # Rendezvous of the attempt that node 0 has ordered.
        self._rendezvous: Rendezvous | None = None
        self._attempt: int | None = None  # number of that attempt
        self._ending: Message | None = None  # the leader's last message
        self._outcome = NodeOutcome(0)  # outcome of the newest attempt

    def run(self) -> NoReturn:
        try:
            while True:
                self._run_attempt(self._next_rendezvous())
        except SystemExit as end:
            # Without a last message, nobody has ordered the copies to be written: this node writes what it has, which
            # is all of them on two nodes. When a node leaves, the others have its copies.
            leaves_job = isinstance(end, NodeLeavesError) and self._options.node_rank > 0
            if self._ending is None and not leaves_job:
                last_copy.write_alone(self._launch, self._count)
            raise
        finally:
            if self._link is not None:
                self._link.close()

    def _next_rendezvous(self) -> Rendezvous:
        """Wait for the order to run an attempt."""
        handlers: Handlers = {
            SignalReceived: self._on_signal,
            AttemptOrdered: self._on_order,
            TextReceived: self._on_text,
        }
        # A message that came before the last one is still handled.
        self._rendezvous = None
        while self._ending is None or not self._launch.events.is_empty:
            if self._ending is None and (self._link is None or self._link.is_lost):
                self._connect()
            if not self._launch.events.handle_next(NODE_SILENT_SECONDS, handlers):
                self._look_for_silence()
            if self._rendezvous is not None:
                return self._rendezvous
        if self._ending["text"]:
            self._say(self._ending["text"])
        if self._ending["do"] == "leave":
            raise NodeLeavesError(self._ending["code"])
        raise SystemExit(self._ending["code"])

    def _look_for_silence(self) -> None:
        link = self._link
        if link is None or time.monotonic() - link.received_at <= NODE_SILENT_SECONDS:
            return
        self._say(
            f"node 0 has said nothing for {NODE_SILENT_SECONDS:g} s: its npurun is stopped, or its host hangs"
        )
        link.close()
        link.is_lost = True

    def _on_order(self, order: AttemptOrdered) -> None:
        nodes = tuple(order.nodes)
        change = ledger.change(self._nodes, nodes, self._options.nproc_per_node)
        if change and not order.saves_copies:
            self._say(change)
        self._nodes = nodes
        self._count = order.count + 1
        # The nodes send their copies around in a circle.
        index = (nodes.index(self._options.node_rank) + 1) % len(nodes)
        host, _, copies_port = order.copies[index].rpartition(" ")
        address = None
        # A node that has told no port takes no copies.
        if len(nodes) > 1 and copies_port.isdecimal():
            # Node 0 is where this node has reached it.
            address = host or self._leader[0], int(copies_port)
        self._neighbour.send_to(address)
        self._rendezvous = Rendezvous(
            order.job_id, order.port, None, None, nodes, order.count, order.saves_copies
        )

    def _on_text(self, received: TextReceived) -> None:
        self._say(received.text)

    def _on_signal(self, received: SignalReceived) -> None:
        """Let the job end, between two attempts; without node 0, or with another signal, this node ends at once."""
        is_request = received.number == self._options.preempt_signal
        code = 128 + received.number
        if self._outcome.interrupted or (is_request and self._outcome.code == RESUMABLE):
            code = self._outcome.code
        if is_request and self._options.outlives_preemption:
            raise NodeLeavesError(code)
        if self._link is not None:
            self._link.send("interrupted", signal=received.number)
        if self._link is None or self._link.is_lost or self._outcome.interrupted:
            raise SystemExit(code)
        self._outcome = NodeOutcome(code, interrupted=True)

    def _run_attempt(self, rendezvous: Rendezvous) -> None:
        link = self._link
        assert link is not None
        if link.is_lost:
            return
        outcome = self._outcome
        if rendezvous.saves_copies:
            launch = last_copy.launch_of_writers(self._launch)
            outcome = Attempt(launch, rendezvous, AttemptObserver()).run()
        # The order of an attempt may cross a signal.
        elif not outcome.interrupted:
            outcome = Attempt(self._launch, rendezvous, _LeaderNotifier(link)).run()
            self._outcome = outcome
        self._attempt = None
        link.send("outcome", **asdict(outcome))
        outlives = self._options.outlives_preemption and not rendezvous.saves_copies
        if outcome.preempted and outlives and self._options.node_rank > 0:
            raise NodeLeavesError(outcome.code)

    def _connect(self) -> None:
        if self._outcome.interrupted:
            raise SystemExit(self._outcome.code)
        # A node waits as long as the leader waits for nodes.
        seconds = self._options.rejoin_timeout
        if self._link is not None:
            self._link.close()
            self._link = None
            self._say(
                f"lost the connection to node 0: trying to reach it again for {seconds:g} s (--rejoin-timeout)"
            )
        link = self._reach_leader(seconds)
        self._link = link
        link.send(
            "hello",
            node=self._options.node_rank,
            nproc=self._options.nproc_per_node,
            most=self._options.nnodes,
            version=__version__,
            count=self._count,
            nodes=self._nodes,
            copies=self._neighbour.port,
        )
        threading.Thread(
            target=self._receive, args=(link,), name="npurun-member", daemon=True
        ).start()

    def _reach_leader(self, seconds: float) -> Link:
        deadline = time.monotonic() + seconds
        secret = self._secret + _OF_NODES
        while True:
            try:
                return Link(handshake.reach(*self._leader, NODE_CONNECT_SECONDS, secret))
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
            # What the lost connection has brought is out of date.
            self._launch.events.handle_next(NODE_PAUSE_SECONDS, {SignalReceived: self._on_signal})

    def _receive(self, link: Link) -> None:
        """Make events of the messages of node 0."""
        put = self._launch.events.put
        for message in link.messages():
            action = message["do"]
            if action == "plan":
                self._attempt = message["count"]
                put(AttemptOrdered(**{name: message[name] for name in _FIELDS["plan"]}))
            elif action == "say":
                put(TextReceived(message["text"]))
            elif action == "stop":
                put(StopOrdered(message["why"], self._attempt))
            elif action in ("over", "leave"):
                self._ending = message
                put(StopOrdered("node 0 has ended the part of the job on this node", self._attempt))
        # Reading ends only with the connection.
        put(StopOrdered("lost the connection to node 0", self._attempt))
