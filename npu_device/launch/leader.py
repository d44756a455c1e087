"""Node 0's side of a job on several nodes that may restart: decides when an attempt begins, and with which nodes.

The launcher of each node, node 0 too, is a ``member`` that carries out its orders. ``ledger`` decides on restarts.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
import traceback
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any, Callable

from npu_device._src.cluster import ports
from npu_device._src.cluster import time_limits as limits
from npu_device._src.cluster.errors import RESUMABLE, ClusterError
from npu_device._src.cluster.frames import ranges
from npu_device._src.version import __version__
from npu_device.launch import meeting, node_links
from npu_device.launch.attempt import FAILED, USAGE, Launch, Outcome
from npu_device.launch.failures import Failure
from npu_device.launch.ledger import Decision, Ended, Ledger
from npu_device.launch.node_links import Link

_MOST_EVENTS = 1000  # messages that wait; who sends more waits, too


class Leader:
    """The leader of a job's nodes: a context manager, and a thread of node 0's launcher."""

    def __init__(self, launch: Launch, secret: bytes) -> None:
        self._launch = launch
        self._options = launch.options
        self._secret = secret
        self._ledger = Ledger(launch.options)
        port = meeting.master_port(launch.options)
        self._listener = ports.listen((launch.options.master_addr,), (port, port))
        self._events: queue.Queue[tuple[Link, dict[str, Any] | None]] = queue.Queue(_MOST_EVENTS)
        self._nodes: dict[int, Link] = {}
        self._idle: set[int] = set()
        self._expected: set[int] = set(range(launch.options.nnodes))
        self._running: set[int] = set()
        self._outcomes: dict[int, Outcome] = {}
        self._lost: str | None = None
        self._preempted: set[int] = set()  # nodes that are taken away, of the running attempt
        self._first_failed: int | None = None  # the node on which a rank failed, or that was lost, before any of these
        self._is_leaving = False  # this node is taken away
        self._is_stopping = False
        self._deadline: float | None = None
        self._signal: int | None = None
        self._actions: dict[str, Callable[[int, dict[str, Any]], None]] = {
            "failed": self._fail,
            "interrupted": self._interrupt,
            "outcome": self._end,
            "preempted": self._preempt,
        }
        self._thread = threading.Thread(target=self._run, name="npurun-leader", daemon=True)

    @property
    def address(self) -> str:
        host = str(self._listener.getsockname()[0])
        return "127.0.0.1" if host in ("::", "0.0.0.0") else host

    def __enter__(self) -> Leader:
        node_links.serve(self._listener, self._secret, self._serve)
        self._thread.start()
        threading.Thread(target=self._say_alive, name="npurun-alive", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join(2 * limits.NODE_LAST_MESSAGE_SECONDS)

    # The connections

    def _serve(self, link: Link) -> None:
        for message in link.messages():
            self._events.put((link, message))
        self._events.put((link, None))

    def _say_alive(self) -> None:
        while self._thread.is_alive():
            for link in list(self._nodes.values()):
                link.send("alive")
            time.sleep(limits.NODE_ALIVE_SECONDS)

    def _send(self, to: Iterable[int], do: str, **fields: Any) -> None:
        for node in to:
            self._nodes[node].send(do, **fields)

    # The job

    def _run(self) -> None:
        try:
            decision = self._lead()
        except Exception:
            decision = Decision(FAILED, None, f"npurun failed on node 0:\n{traceback.format_exc()}")
        self._send(list(self._nodes), "over", code=decision.code, text=decision.text, attempts=self._history())
        for link in self._nodes.values():
            link.end()
        deadline = time.monotonic() + limits.NODE_LAST_MESSAGE_SECONDS
        while not all(link.is_lost for link in self._nodes.values()) and time.monotonic() < deadline:
            with contextlib.suppress(queue.Empty):
                self._events.get(timeout=limits.SWEEP_SECONDS)
        with self._listener:
            self._listener.shutdown(socket.SHUT_RDWR)

    def _lead(self) -> Decision:
        wait = 0.0
        while True:
            nodes = self._gather(wait)
            if self._signal is not None:
                return Decision(128 + self._signal, None, "")
            if self._is_leaving:
                return self._hand_over(128 + self._options.preempt_signal)
            spent = self._ledger.spent()
            if spent is not None:
                return Decision(FAILED, None, spent)
            if nodes is None:
                last = self._ledger.attempts[-1:]
                return Decision(last[0].code if last and last[0].preempted else FAILED, None, self._complaint())
            try:
                place = meeting.prepare(self._options, lambda _: None, self._ledger.count, nodes)
            except (OSError, ClusterError, ValueError) as error:
                return Decision(USAGE, None, str(error))
            with place:
                decision = self._attempt(place)
            if decision.wait is None:
                return decision
            place.end()
            self._let_go(decision)
            if self._is_leaving:
                return self._hand_over(decision.code)
            self._expected = set(nodes)
            self._send(list(self._nodes), "say", text=decision.text)
            wait = decision.wait

    def _gather(self, wait: float) -> tuple[int, ...] | None:
        began = time.monotonic()
        deadline = began + max(wait, self._options.rejoin_timeout)
        has_notified = False
        while self._signal is None and not self._is_leaving:
            now = time.monotonic()
            is_there = self._expected <= self._idle
            if (is_there and now >= began + wait) or now >= deadline:
                break
            if not is_there and not has_notified and now >= began + limits.NODE_NOTICE_SECONDS:
                has_notified = True
                missing = ranges(self._expected - self._idle)
                text = f"waiting for node {missing}, for {deadline - now:.0f} s at most"
                self._send(list(self._idle), "say", text=text)
            ends = [deadline]
            if now < began + wait:
                ends.append(began + wait)
            if not is_there and not has_notified:
                ends.append(began + limits.NODE_NOTICE_SECONDS)
            self._handle(min(ends))
        return tuple(sorted(self._idle)) if len(self._idle) >= self._options.fewest_nodes else None

    def _complaint(self) -> str:
        here, fewest = ranges(self._idle), self._options.fewest_nodes
        missing = ranges(set(range(self._options.nnodes)) - self._idle)
        return (
            f"node(s) {missing} did not come within {self._options.rejoin_timeout:g} s (--rejoin-timeout); there are "
            f"only {here}, and the job needs {fewest}.\n"
            "What to do: look at the output of npurun on these nodes; let the cluster start npurun there again; or "
            f"allow fewer nodes (--nnodes MIN:{self._options.nnodes})."
        )

    def _attempt(self, place: meeting.Meeting) -> Decision:
        began = time.time()
        self._running, self._outcomes, self._lost = set(place.nodes), {}, None
        self._preempted, self._first_failed = set(), None
        self._is_stopping, self._deadline = False, None
        self._idle -= self._running
        plan = {"count": place.count, "nodes": place.nodes, "job_id": place.job_id, "port": place.port}
        self._send(place.nodes, "plan", **plan, attempts=self._history())
        while self._running:
            if not self._handle(self._deadline):
                self._time_out()
        is_preemption = self._first_failed is None or self._first_failed in self._preempted
        preempted = sorted(self._preempted) if is_preemption else ()
        return self._ledger.add(began, place.nodes, self._outcomes.values(), self._launch.step(), self._lost, preempted)

    def _let_go(self, decision: Decision) -> None:
        """End the part of the nodes that are taken away; their npuruns are started again elsewhere, or never."""
        for node in sorted(self._preempted & set(self._nodes)):
            if node == 0:
                self._is_leaving = True
                continue
            link = self._nodes.pop(node)
            self._idle.discard(node)
            code = self._outcomes[node].code if node in self._outcomes else decision.code
            link.send("over", code=code, text=decision.text, attempts=self._history())
            link.end()

    def _hand_over(self, code: int) -> Decision:
        """Leave the other nodes to the next npurun of node 0, for which they wait."""
        for node in set(self._nodes) - {0}:
            link = self._nodes.pop(node)
            text = "node 0 is taken away: its npurun has to be started again"
            link.send("say", text=text, attempts=self._history())
            link.end()
        return Decision(code, None, "")

    def _stop(self, why: str) -> None:
        if not self._is_stopping:
            self._is_stopping = True
            limit = max(self._options.grace, self._options.preempt_timeout) + limits.NODE_STOP_SECONDS
            self._deadline = time.monotonic() + limit
            self._send(list(self._running), "stop", why=why)

    def _time_out(self) -> None:
        if not self._is_stopping:
            self._stop(f"node(s) {ranges(self._running)} did not end although the others were asked to stop")
            return
        for node in list(self._running):
            self._nodes[node].close()  # a frozen npurun sees it when it continues
            self._lose(node, "does not answer")

    # Messages of the nodes

    def _handle(self, until: float | None) -> bool:
        try:
            link, message = self._events.get(timeout=None if until is None else max(0.0, until - time.monotonic()))
        except queue.Empty:
            return False
        self._take(link, message)
        return True

    def _node_of(self, link: Link) -> int | None:
        return next((node for node, known in self._nodes.items() if known is link), None)

    def _take(self, link: Link, message: dict[str, Any] | None) -> None:
        node = self._node_of(link)
        if message is not None and message["do"] == "hello":
            self._register(link, message)
        elif node is not None and message is None:
            self._lose(node, "is gone: its npurun ended or was killed, or its host can't be reached")
        elif node is not None and message is not None:
            self._actions[message["do"]](node, message)

    def _register(self, link: Link, hello: dict[str, Any]) -> None:
        node = int(hello["node"])
        ours = {"nproc": self._options.nproc_per_node, "most": self._options.nnodes, "version": __version__}
        wrong = [f"{name} {hello.get(name)} (node 0: {value})" for name, value in ours.items() if hello[name] != value]
        if not wrong and not 0 <= node < self._options.nnodes:
            wrong = [f"it is not one of nodes 0 to {self._options.nnodes - 1}"]
        if not wrong and node == 0 and 0 in self._nodes:
            wrong = ["node 0 has one already"]
        if wrong:
            link.send("refused", text=f"node {node} doesn't match node 0: {', '.join(wrong)}")
            link.end()
            return
        old = self._nodes.get(node)
        if old is not None:
            old.send("refused", text=f"another npurun was started as node {node}")
            old.end()
            self._lose(node, "was started again")
        self._nodes[node] = link
        self._idle.add(node)
        if self._running:
            at_work = f"the job is running on node(s) {ranges(self._running)}; this node joins at the next restart"
            link.send("say", text=at_work)
        else:
            self._take_history(hello)

    def _take_history(self, hello: dict[str, Any]) -> None:
        """Learn from a node what has happened so far, if this launcher has been started again."""
        attempts, last = [Ended.read(fields) for fields in hello["attempts"]], hello["last"]
        if len(attempts) > len(self._ledger.attempts):
            self._ledger.attempts = attempts
        if last is not None and last["count"] >= self._ledger.count:
            self._expected = set(last["nodes"])
            gone = "node 0 is gone: its npurun ended or was killed"
            self._ledger.add(last["began"], last["nodes"], [], None, gone, last["preempted"])

    def _interrupt(self, node: int, message: dict[str, Any]) -> None:
        self._signal = int(message["signal"])

    def _fail(self, node: int, message: dict[str, Any]) -> None:
        if node in self._running:
            self._note_failure(node)
            self._stop(f"node {node}: {message['what']}")

    def _preempt(self, node: int, message: dict[str, Any]) -> None:
        """Note that a node is taken away. Its ranks end the attempt, resumable or not."""
        if not self._options.outlives_preemption:
            return
        if node in self._running:
            self._preempted.add(node)
            # Every node learns it: node 0 itself may be killed soon.
            self._send(list(self._nodes), "preempted", nodes=sorted(self._preempted))
        elif node == 0:
            self._is_leaving = True
        elif node in self._idle:
            self._nodes.pop(node).end()
            self._idle.discard(node)

    def _note_failure(self, node: int) -> None:
        if self._first_failed is None and not self._preempted:
            self._first_failed = node

    def _lose(self, node: int, how: str) -> None:
        del self._nodes[node]
        self._idle.discard(node)
        if node in self._running:
            self._note_failure(node)
            self._running.discard(node)
            self._lost = self._lost or f"node {node} {how}"
            self._stop(f"node {node} {how}")

    def _end(self, node: int, message: dict[str, Any]) -> None:
        if node not in self._running:
            return
        failures = tuple(Failure(**failure) for failure in message["failures"])
        outcome = Outcome(message["code"], message["interrupted"], message["preempted"], failures)
        self._outcomes[node] = outcome
        self._running.discard(node)
        self._idle.add(node)
        if outcome.code not in (0, RESUMABLE):
            self._stop(f"node {node}: {failures[0] if failures else 'stopped'}")
        elif outcome.code == RESUMABLE and self._deadline is None:
            self._deadline = time.monotonic() + self._options.preempt_timeout

    def _history(self) -> list[dict[str, Any]]:
        return [asdict(attempt) for attempt in self._ledger.attempts]
