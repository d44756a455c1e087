"""Node 0's side of a job on several nodes that may restart: decides when an attempt begins, and with which nodes.

The launcher of each node, node 0 too, is a ``member`` that carries out its orders. ``ledger`` decides on restarts.
"""

from __future__ import annotations

import dataclasses
import queue
import time
import traceback
from collections.abc import Iterable
from typing import Any, NamedTuple

from npu_device._src.cluster import frames, ports, time_limits as limits
from npu_device._src.cluster.rank_errors import RESUMABLE
from npu_device._src.threads import start_thread
from npu_device._src.version import __version__
from npu_device._src.wording import ranges
from npu_device.launch import last_copy
from npu_device.launch.events import Events, handle_next
from npu_device.launch.joins import Joins
from npu_device.launch.ledger import AttemptRecord, Decision, Ledger, resize
from npu_device.launch.node_protocol import (
    Alive,
    JobEnd,
    JobInterrupted,
    Link,
    NodeEnd,
    NodeHello,
    NodeOutcome,
    NodePreempted,
    Notice,
    RankFailed,
    StopOrder,
    serve,
)
from npu_device.launch.preparation import (
    FAILED,
    START_ERRORS,
    USAGE,
    Launch,
    Rendezvous,
    master_port,
    prepare_rendezvous,
)

_MOST_EVENTS = 1000  # messages that wait; who sends more waits, too
# Node 0 leaves a job that goes on when its npurun is started again.
_NOT_OVER = Decision(RESUMABLE)


class _Received(NamedTuple):
    link: Link
    message: Any  # None tells that the connection has ended


class Leader:
    """The leader of a job's nodes: a context manager, and a thread of node 0's launcher."""

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self._options = launch.options
        self._ledger = Ledger(launch.options)
        self._joins = Joins(launch)
        port = master_port(launch.options)
        # The port is taken at once: one in use is an error of the start.
        self._listener = ports.listen((launch.options.master_addr,), (port, port))
        self.address = ports.reached_at(self._listener)
        self._events: Events = queue.Queue(_MOST_EVENTS)
        self._links: dict[int, Link] = {}
        # Where each node takes the copies of another one: host and port. That of node 0 has no host.
        self._copy_addresses: dict[int, str] = {}
        self._all = set(range(launch.options.nnodes))
        self._expected = self._all
        self._attempt = AttemptRecord(0, ())  # the newest one
        self._running = set[int]()
        self._is_stopping = False
        self._deadline: float | None = None
        # Why no attempt follows: a signal, or this node has been taken away.
        self._ending: Decision | None = None

    def __enter__(self) -> Leader:
        serve(self._listener, self._launch.secret, self._serve)
        self._thread = start_thread("npurun-leader", self._run)
        start_thread("npurun-alive", self._say_alive)
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join(2 * limits.NODE_LAST_MESSAGE_SECONDS)

    def _serve(self, link: Link) -> None:
        for message in link.messages():
            self._events.put(_Received(link, message))
        self._events.put(_Received(link, None))

    def _say_alive(self) -> None:
        while self._thread.is_alive():
            self._send(list(self._links), Alive())
            time.sleep(limits.NODE_ALIVE_SECONDS)

    @property
    def _idle(self) -> set[int]:
        """Return the nodes that are there and take no part in an attempt."""
        return self._links.keys() - self._running

    def _send(self, receivers: Iterable[int], message: Any) -> None:
        for link in filter(None, map(self._links.get, list(receivers))):
            link.send(message)

    def _run(self) -> None:
        try:
            decision = self._lead()
            # After an attempt, even if node 0 leaves: it may have the only copy.
            if decision is not _NOT_OVER:
                self._write_copies()
        except Exception:
            text = f"npurun failed on node 0:\n{traceback.format_exc()}"
            decision = Decision(FAILED, text, is_over=True)
        words = self._ledger.last_words(decision.text)
        for node, link in self._links.items():
            if decision.is_over:
                link.end(JobEnd(decision.code, words))
            elif node == 0:
                link.end(NodeEnd(decision.code, words))
            else:
                link.end(Notice("node 0 is taken away: its npurun has to be started again"))
        # The listener stays until the others have read that, and have closed their links.
        deadline = time.monotonic() + limits.NODE_LAST_MESSAGE_SECONDS
        while (
            not all(link.is_lost for link in self._links.values()) and time.monotonic() < deadline
        ):
            handle_next(self._events, {}, time.monotonic() + limits.SWEEP_SECONDS)
        with self._listener:
            frames.shut_down(self._listener)

    def _lead(self) -> Decision:
        """Run attempts until the job is over, or this node leaves it."""
        wait = 0.0
        while True:
            nodes = self._gather(wait)
            if self._ending is not None:
                return self._ending
            if nodes is None:
                return self._too_few_nodes()
            try:
                rendezvous = prepare_rendezvous(self._options, self._ledger.count, nodes)
            except START_ERRORS as error:
                return Decision(USAGE, str(error), is_over=True)
            self._note_change(nodes)
            with rendezvous:
                decision = self._run_attempt(rendezvous)
            newest = self._attempt
            if decision.is_over or 0 in newest.preempted:
                return decision
            rendezvous.end()
            # Nodes of the last attempt are worth waiting for; others join if they come.
            self._expected = set(nodes).difference(newest.rejected)
            # A node that was taken away can join when it comes back.
            if self._joins.may_join(newest.taken_away):
                self._expected.difference_update(newest.taken_away)
            self._joins.keep_out(newest.rejected)
            # The end for a join is told with the number of ranks that follows.
            if decision.text:
                self._send(self._links, Notice(decision.text))
            wait = decision.wait

    def _note_change(self, nodes: tuple[int, ...]) -> None:
        """Tell all nodes of another number of ranks than in the attempt before."""
        text = resize(self._attempt, len(nodes) * self._options.nproc_per_node)
        if text:
            self._send(self._links, Notice(text))
        # The nodes of the first attempt join nothing.
        self._joins.begin(set(nodes).difference(self._attempt.nodes or nodes))

    def _too_few_nodes(self) -> Decision:
        options = self._options
        code = FAILED
        if self._attempt.taken_away:
            code = self._attempt.code
        return Decision(
            code,
            f"node(s) {ranges(self._all - self._idle)} did not come within {options.rejoin_timeout:g} s "
            f"(--rejoin-timeout); there are only {ranges(self._idle)}, and the job needs {options.fewest_nodes}.\n"
            "What to do: look at the output of npurun on these nodes; let the cluster start npurun there "
            f"again; or allow fewer nodes (--nnodes MIN:{options.nnodes}).",
            is_over=True,
        )

    def _gather(self, wait: float) -> tuple[int, ...] | None:
        """Wait a while, and for the expected nodes; return those that are there, or None if they are too few."""
        began = time.monotonic()
        earliest_start = began + wait
        deadline = began + max(wait, self._options.rejoin_timeout)
        notice_at = began + limits.NODE_NOTICE_SECONDS
        time_now = began
        while self._ending is None and time_now < deadline:
            # Nodes that are away aren't waited for as soon as the job can go on.
            absent = self._all - self._idle
            if self._is_enough():
                absent = self._expected - self._idle
            if not absent and time_now >= earliest_start:
                break
            if absent and time_now >= notice_at:
                # It is said once.
                notice_at = deadline
                text = f"waiting for node {ranges(absent)}, for {deadline - time_now:.0f} s at most"
                self._send(self._idle, Notice(text))
            until = earliest_start
            if absent:
                until = time_now + limits.NODE_PAUSE_SECONDS
            self._handle(min(deadline, until))
            time_now = time.monotonic()
        if not self._is_enough():
            return None
        # Nodes whose join has failed are left out if the others are enough.
        ready = self._joins.ready(self._idle)
        if len(ready) < self._options.fewest_nodes:
            ready = self._idle
        return tuple(sorted(ready))

    def _is_enough(self) -> bool:
        return len(self._idle) >= self._options.fewest_nodes

    def _write_copies(self) -> None:
        """Let the nodes that are left write the newest copy in memory, each what it has."""
        # All but node 0 go at once when they are taken away.
        leaving = self._attempt.preempted - {0}
        while nodes := sorted(self._idle - leaving):
            if not last_copy.is_needed(self._launch):
                return
            options = last_copy.launch_of_writers(self._launch).options
            with prepare_rendezvous(options, self._ledger.count, nodes) as rendezvous:
                self._run_ranks(rendezvous, saves_copies=True)
            self._ledger.count += 1
            # Those that are left when a node is lost may still have a whole copy.
            if self._attempt.loss is None:
                return

    def _run_attempt(self, rendezvous: Rendezvous) -> Decision:
        self._run_ranks(rendezvous)
        self._attempt.step = self._launch.step()
        self._attempt.is_granted = self._joins.is_granted
        self._attempt.suspects = self._joins.suspects(rendezvous.plan.nodes)
        return self._ledger.add(self._attempt)

    def _run_ranks(self, rendezvous: Rendezvous, saves_copies: bool = False) -> None:
        """Return when all nodes have told the outcome of an attempt, or are lost."""
        nodes = rendezvous.plan.nodes
        self._attempt = AttemptRecord(rendezvous.plan.count, nodes)
        self._running = set(nodes)
        self._is_stopping = False
        self._deadline = None
        copies = [self._copy_addresses[node] for node in nodes]
        plan = dataclasses.replace(rendezvous.plan, copies=copies, saves_copies=saves_copies)
        self._send(nodes, plan)
        while self._running:
            if self._handle(self._ask_for_joins()) or self._deadline is None:
                continue
            if time.monotonic() >= self._deadline:
                self._stop_late_nodes()

    def _stop_late_nodes(self) -> None:
        if not self._is_stopping:
            self._stop(
                f"node(s) {ranges(self._running)} did not end although the others were asked to stop"
            )
            return
        for node in list(self._running):
            # A frozen npurun sees the end when it continues.
            self._links[node].close()
            self._lose(node, "does not answer")

    def _ask_for_joins(self) -> float | None:
        """Ask the ranks to end for nodes that have come, if it is time; return when the leader has to look again."""
        attempt = self._attempt
        is_ending = self._is_stopping or attempt.outcomes or attempt.preempted
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
            self._send(self._running, StopOrder(why))

    def _handle(self, until: float | None) -> bool:
        """Handle the next message; return False if none comes before a time."""
        return handle_next(self._events, {_Received: self._on_received}, until)

    def _on_received(self, received: _Received) -> None:
        link, message = received
        if isinstance(message, NodeHello):
            self._register(link, message)
            return
        # A connection that another one has replaced is no node's.
        for node in [node for node, its_link in self._links.items() if its_link is link]:
            if message is None:
                self._lose(
                    node, "is gone: its npurun ended or was killed, or its host can't be reached"
                )
            else:
                self._on_message(node, message)

    def _on_message(self, node: int, message: Any) -> None:
        if isinstance(message, JobInterrupted):
            self._ending = Decision(128 + message.signal, is_over=True)
        elif node not in self._running:
            return
        elif isinstance(message, RankFailed):
            self._stop(f"node {node}: {message.what}")
        elif isinstance(message, NodePreempted) and self._options.outlives_preemption:
            # The outcome follows: the ranks still write their checkpoints, and end the attempt, resumable or not.
            self._attempt.preempted.add(node)
        elif isinstance(message, NodeOutcome):
            self._attempt.outcomes[node] = message
            self._running.discard(node)
            if message.code not in (0, RESUMABLE):
                self._stop(f"node {node}: {message.failure or 'stopped'}")
            elif message.code == RESUMABLE and self._deadline is None:
                # Some ranks have left with a checkpoint: the others get as long for theirs.
                self._deadline = time.monotonic() + self._options.preempt_timeout

    def _register(self, link: Link, hello: NodeHello) -> None:
        node = hello.node
        problem = self._mismatch(hello)
        if problem:
            link.end(JobEnd(USAGE, f"node {node} doesn't match node 0: {problem}"))
            return
        # The newer one counts: the older may be cut off without knowing it.
        if node in self._links:
            self._links[node].end(JobEnd(USAGE, f"another npurun was started as node {node}"))
            self._lose(node, "was started again")
        self._links[node] = link
        host = ""
        if node > 0:
            host = link.host
        self._copy_addresses[node] = f"{host} {hello.copies or ''}"
        if self._running:
            self._ask_for_joins()
            link.send(Notice(self._joins.plan(self._running, [node])))
        elif hello.count > self._ledger.count:
            # This launcher has been started again.
            self._ledger.count = hello.count
            # The member tells who took part, since this launcher knows nothing of the attempts before it started.
            self._expected = self._all.intersection(hello.nodes)

    def _mismatch(self, hello: NodeHello) -> str:
        """Return why a launcher can't take part in the job; "" if it can."""
        settings = {
            "nproc": self._options.nproc_per_node,
            "most": self._options.nnodes,
            "version": __version__,
        }
        differences = []
        for name, setting in settings.items():
            setting_there = getattr(hello, name)
            if setting_there != setting:
                differences.append(f"{name} {setting_there} (node 0: {setting})")
        if differences:
            return ", ".join(differences)
        if not 0 <= hello.node < self._options.nnodes:
            return f"it is not one of nodes 0 to {self._options.nnodes - 1}"
        if hello.node == 0 and 0 in self._links:
            return "node 0 has one already"
        return ""

    def _lose(self, node: int, how: str) -> None:
        del self._links[node]
        if node == 0:
            self._ending = self._ending or _NOT_OVER
        if node in self._running:
            self._running.discard(node)
            self._attempt.loss = self._attempt.loss or f"node {node} {how}"
            self._stop(f"node {node} {how}")
