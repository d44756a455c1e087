"""Node 0's side of a job on several nodes that may restart: decides when an attempt begins, and with which nodes.

The launcher of each node, node 0 too, is a ``member`` that carries out its orders. ``ledger`` decides on restarts.
"""

from __future__ import annotations

import queue
import socket
import threading
import time
import traceback
from collections.abc import Iterable
from typing import Any

from npu_device._src.cluster import ports, time_limits as limits
from npu_device._src.cluster.frames import Message
from npu_device._src.cluster.rank_errors import RESUMABLE, ClusterError
from npu_device._src.version import __version__
from npu_device._src.wording import ranges
from npu_device.launch import last_copy
from npu_device.launch.attempt import (
    FAILED,
    USAGE,
    Launch,
    NodeOutcome,
    Rendezvous,
    master_port,
    prepare_rendezvous,
)
from npu_device.launch.failures import Failure
from npu_device.launch.joins import Joins
from npu_device.launch.ledger import Decision, Ledger, resize
from npu_device.launch.member import Link, serve

_MOST_EVENTS = 1000  # messages that wait; who sends more waits, too
# Node 0 leaves a job that goes on when its npurun is started again.
_NOT_OVER = Decision(RESUMABLE, 0.0, "")


class Leader:
    """The leader of a job's nodes: a context manager, and a thread of node 0's launcher."""

    def __init__(self, launch: Launch, secret: bytes) -> None:
        self._launch = launch
        self._options = launch.options
        self._secret = secret
        self._ledger = Ledger(launch.options)
        self._joins = Joins(launch)
        port = master_port(launch.options)
        # The port is taken at once: one in use is an error of the start.
        self._listener = ports.listen((launch.options.master_addr,), (port, port))
        self._events: queue.Queue[tuple[Link, Message | None]] = queue.Queue(_MOST_EVENTS)
        self._links: dict[int, Link] = {}
        # Where each node takes the copies of another one: host and port. That of node 0 has no host.
        self._copy_addresses: dict[int, str] = {}
        self._idle: set[int] = set()
        self._all = set(range(launch.options.nnodes))
        self._expected = self._all
        self._running: set[int] = set()
        self._outcomes: dict[int, NodeOutcome] = {}
        self._loss: str | None = None  # the first loss of a node in the attempt
        self._preempted: set[int] = set()  # nodes that are taken away, of the running attempt
        self._is_stopping = False
        self._deadline: float | None = None
        self._is_leaving = False  # this node has been taken away
        self._signal: int | None = None
        self._thread = threading.Thread(target=self._run, name="npurun-leader", daemon=True)

    @property
    def address(self) -> str:
        host = str(self._listener.getsockname()[0])
        # An address that means all interfaces can't be connected to.
        if host in ("::", "0.0.0.0"):
            return "127.0.0.1"
        return host

    def __enter__(self) -> Leader:
        serve(self._listener, self._secret, self._serve)
        self._thread.start()
        threading.Thread(target=self._say_alive, name="npurun-alive", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join(2 * limits.NODE_LAST_MESSAGE_SECONDS)

    def _serve(self, link: Link) -> None:
        for message in link.messages():
            self._events.put((link, message))
        # None tells that the connection has ended.
        self._events.put((link, None))

    def _say_alive(self) -> None:
        while self._thread.is_alive():
            self._send(list(self._links), "alive")
            time.sleep(limits.NODE_ALIVE_SECONDS)

    def _send(self, receivers: Iterable[int], do: str, **fields: Any) -> None:
        for link in filter(None, map(self._links.get, list(receivers))):
            link.send(do, **fields)

    def _run(self) -> None:
        try:
            decision = self._lead()
            # After an attempt, even if node 0 leaves: it may have the only copy.
            if decision is not _NOT_OVER:
                self._write_copies()
        except Exception:
            decision = Decision(FAILED, None, f"npurun failed on node 0:\n{traceback.format_exc()}")
        words = self._ledger.last_words(decision)
        for node, link in self._links.items():
            if decision.wait is None:
                link.end("over", code=decision.code, text=words)
            elif node == 0:
                link.end("leave", code=decision.code, text=words)
            else:
                link.end("say", text="node 0 is taken away: its npurun has to be started again")
        # The listener stays until the others have read that, and have closed their links.
        deadline = time.monotonic() + limits.NODE_LAST_MESSAGE_SECONDS
        while (
            not all(link.is_lost for link in self._links.values()) and time.monotonic() < deadline
        ):
            self._next_event(time.monotonic() + limits.SWEEP_SECONDS)
        with self._listener:
            self._listener.shutdown(socket.SHUT_RDWR)

    def _lead(self) -> Decision:
        """Run attempts until the job is over, or this node leaves it."""
        wait = 0.0
        while True:
            nodes = self._gather(wait)
            if self._signal is not None:
                return Decision(128 + self._signal, None, "")
            if self._is_leaving:
                return _NOT_OVER
            if nodes is None:
                return self._too_few_nodes()
            try:
                rendezvous = prepare_rendezvous(self._options, self._ledger.count, nodes)
            except (OSError, ClusterError, ValueError) as error:
                return Decision(USAGE, None, str(error))
            self._note_change(nodes)
            with rendezvous:
                decision = self._attempt(rendezvous)
            if decision.wait is None or 0 in self._preempted:
                return decision
            rendezvous.end()
            # Nodes of the last attempt are worth waiting for; others join if they come.
            newest = self._ledger.attempts[-1]
            self._expected = set(nodes).difference(newest.rejected)
            # A node that was taken away can join when it comes back.
            if self._joins.due_at(newest.preempted) is not None:
                self._expected.difference_update(newest.preempted)
            self._joins.keep_out(newest.rejected)
            # The end for a join is told with the number of ranks that follows.
            if decision.text:
                self._send(self._links, "say", text=decision.text)
            wait = decision.wait

    def _note_change(self, nodes: tuple[int, ...]) -> None:
        """Tell all nodes of another number of ranks than in the attempt before."""
        joined: set[int] = set()
        for newest in self._ledger.attempts[-1:]:
            joined = set(nodes).difference(newest.nodes)
            text = resize(newest, len(nodes) * self._options.nproc_per_node)
            if text:
                self._send(self._links, "say", text=text)
        self._joins.begin(joined)

    def _too_few_nodes(self) -> Decision:
        options = self._options
        code = FAILED
        for attempt in self._ledger.attempts[-1:]:
            if attempt.preempted:
                code = attempt.code
        return Decision(
            code,
            None,
            f"node(s) {ranges(self._all - self._idle)} did not come within {options.rejoin_timeout:g} s "
            f"(--rejoin-timeout); there are only {ranges(self._idle)}, and the job needs {options.fewest_nodes}.\n"
            "What to do: look at the output of npurun on these nodes; let the cluster start npurun there "
            f"again; or allow fewer nodes (--nnodes MIN:{options.nnodes}).",
        )

    def _gather(self, wait: float) -> tuple[int, ...] | None:
        """Wait a while, and for the expected nodes; return those that are there, or None if they are too few."""
        began = time.monotonic()
        earliest_start = began + wait
        deadline = began + max(wait, self._options.rejoin_timeout)
        notice_at = began + limits.NODE_NOTICE_SECONDS
        time_now = began
        is_told = False
        while self._signal is None and not self._is_leaving and time_now < deadline:
            # Nodes that are away aren't waited for as soon as the job can go on.
            absent = self._all - self._idle
            if self._is_enough():
                absent = self._expected - self._idle
            if not absent and time_now >= earliest_start:
                break
            if absent and not is_told and time_now >= notice_at:
                is_told = True
                text = f"waiting for node {ranges(absent)}, for {deadline - time_now:.0f} s at most"
                self._send(self._idle, "say", text=text)
            until = earliest_start
            if absent:
                until = time_now + limits.NODE_PAUSE_SECONDS
            self._handle(min(deadline, until))
            time_now = time.monotonic()
        if not self._is_enough():
            return None
        return tuple(sorted(self._ready()))

    def _ready(self) -> set[int]:
        """Return the idle nodes, without those whose join has failed if the others are enough."""
        ready = self._joins.ready(self._idle)
        if len(ready) >= self._options.fewest_nodes:
            return ready
        return self._idle

    def _is_enough(self) -> bool:
        return len(self._idle) >= self._options.fewest_nodes

    def _write_copies(self) -> None:
        """Let the nodes that are left write the newest copy in memory, each what it has."""
        # All but node 0 go at once when they are taken away.
        leaving = self._preempted - {0}
        while nodes := sorted(self._idle - leaving):
            if not last_copy.is_needed(self._launch):
                return
            options = last_copy.launch_of_writers(self._launch).options
            with prepare_rendezvous(options, self._ledger.count, nodes) as rendezvous:
                self._run_ranks(rendezvous, saves_copies=True)
            self._ledger.count += 1
            # Those that are left when a node is lost may still have a whole copy.
            if self._loss is None:
                return

    def _attempt(self, rendezvous: Rendezvous) -> Decision:
        began = time.time()
        self._run_ranks(rendezvous)
        return self._ledger.add(
            began,
            rendezvous.nodes,
            self._outcomes.values(),
            self._launch.step(),
            self._loss,
            sorted(self._preempted),
            self._joins.is_asked,
            self._joins.suspects(rendezvous.nodes),
        )

    def _run_ranks(self, rendezvous: Rendezvous, saves_copies: bool = False) -> None:
        """Return when all nodes have told the outcome of an attempt, or are lost."""
        self._running = set(rendezvous.nodes)
        self._idle -= self._running
        self._outcomes = {}
        self._loss = None
        self._preempted = set()
        self._is_stopping = False
        self._deadline = None
        self._send(
            rendezvous.nodes,
            "plan",
            count=rendezvous.count,
            nodes=rendezvous.nodes,
            job_id=rendezvous.job_id,
            port=rendezvous.port,
            copies=[self._copy_addresses[node] for node in rendezvous.nodes],
            saves_copies=saves_copies,
        )
        while self._running:
            if self._handle(self._ask_for_joins()):
                continue
            if self._deadline is None or time.monotonic() < self._deadline:
                continue
            if not self._is_stopping:
                self._stop(
                    f"node(s) {ranges(self._running)} did not end although the others were asked to stop"
                )
                continue
            for node in list(self._running):
                # A frozen npurun sees the end when it continues.
                self._links[node].close()
                self._lose(node, "does not answer")

    def _ask_for_joins(self) -> float | None:
        """Ask the ranks to end for nodes that have come, if it is time; return when the leader has to look again."""
        is_ending = self._is_stopping or self._outcomes or self._preempted
        due_at = self._joins.due_at(self._idle)
        if is_ending or due_at is None:
            return self._deadline
        if time.monotonic() >= due_at:
            self._joins.ask(self._running, self._idle)
            due_at = self._joins.due_at(self._idle)
        return due_at

    def _stop(self, why: str) -> None:
        if not self._is_stopping:
            self._is_stopping = True
            limit = (
                max(self._options.grace, self._options.preempt_timeout) + limits.NODE_STOP_SECONDS
            )
            self._deadline = time.monotonic() + limit
            self._send(self._running, "stop", why=why)

    def _next_event(self, until: float | None) -> tuple[Link, Message | None] | None:
        seconds = None
        if until is not None:
            seconds = max(0.0, until - time.monotonic())
        try:
            return self._events.get(timeout=seconds)
        except queue.Empty:
            return None

    def _handle(self, until: float | None) -> bool:
        """Handle the next message; return False if none comes before a time."""
        event = self._next_event(until)
        if event is None:
            return False
        link, message = event
        if message is not None and message["do"] == "hello":
            self._register(link, message)
            return True
        # A connection that another one has replaced is no node's.
        for node in [node for node, its_link in self._links.items() if its_link is link]:
            if message is None:
                self._lose(
                    node, "is gone: its npurun ended or was killed, or its host can't be reached"
                )
            else:
                self._act(node, message)
        return True

    def _act(self, node: int, message: Message) -> None:
        if message["do"] == "interrupted":
            self._signal = message["signal"]
        elif node not in self._running:
            return
        elif message["do"] == "failed":
            self._stop(f"node {node}: {message['what']}")
        elif message["do"] == "preempted" and self._options.outlives_preemption:
            # The outcome follows: the ranks still write their checkpoints, and end the attempt, resumable or not.
            self._preempted.add(node)
        elif message["do"] == "outcome":
            failure = None
            if message["failure"]:
                failure = Failure(**message["failure"])
            outcome = NodeOutcome(
                message["code"], message["interrupted"], message["preempted"], failure
            )
            self._outcomes[node] = outcome
            self._running.discard(node)
            self._idle.add(node)
            if outcome.code not in (0, RESUMABLE):
                self._stop(f"node {node}: {failure or 'stopped'}")
            elif outcome.code == RESUMABLE and self._deadline is None:
                # Some ranks have left with a checkpoint: the others get as long for theirs.
                self._deadline = time.monotonic() + self._options.preempt_timeout

    def _register(self, link: Link, hello: Message) -> None:
        node = hello["node"]
        problem = self._mismatch(hello)
        if problem:
            link.end("over", code=USAGE, text=f"node {node} doesn't match node 0: {problem}")
            return
        # The newer one counts: the older may be cut off without knowing it.
        if node in self._links:
            self._links[node].end(
                "over", code=USAGE, text=f"another npurun was started as node {node}"
            )
            self._lose(node, "was started again")
        self._links[node] = link
        host = ""
        if node > 0:
            host = link.host
        self._copy_addresses[node] = f"{host} {hello.get('copies') or ''}"
        self._idle.add(node)
        if self._running:
            self._ask_for_joins()
            link.send("say", text=self._joins.plan(self._running, [node]))
        elif hello["count"] > self._ledger.count:
            # This launcher has been started again.
            self._ledger.count = hello["count"]
            # The member tells who took part, since this launcher knows nothing of the attempts before it started.
            self._expected = self._all.intersection(hello["nodes"])

    def _mismatch(self, hello: Message) -> str:
        """Return why a launcher can't take part in the job; "" if it can."""
        settings = {
            "nproc": self._options.nproc_per_node,
            "most": self._options.nnodes,
            "version": __version__,
        }
        differences = []
        for name, setting in settings.items():
            if hello[name] != setting:
                differences.append(f"{name} {hello[name]} (node 0: {setting})")
        if differences:
            return ", ".join(differences)
        if not 0 <= hello["node"] < self._options.nnodes:
            return f"it is not one of nodes 0 to {self._options.nnodes - 1}"
        if hello["node"] == 0 and 0 in self._links:
            return "node 0 has one already"
        return ""

    def _lose(self, node: int, how: str) -> None:
        del self._links[node]
        self._idle.discard(node)
        self._is_leaving = self._is_leaving or node == 0
        if node in self._running:
            self._running.discard(node)
            self._loss = self._loss or f"node {node} {how}"
            self._stop(f"node {node} {how}")
