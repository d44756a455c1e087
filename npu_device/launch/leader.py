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
from npu_device._src.cluster.rank_errors import RESUMABLE, ClusterError
from npu_device._src.version import __version__
from npu_device._src.wording import ranges
from npu_device.launch.attempt import (
    FAILED,
    USAGE,
    Launch,
    Meeting,
    Outcome,
    master_port,
    prepare_meeting,
)
from npu_device.launch.failures import Failure
from npu_device.launch.ledger import Decision, Ledger
from npu_device.launch.member import Link, serve

_MOST_EVENTS = 1000  # messages that wait; who sends more waits, too
_NOT_OVER = Decision(
    RESUMABLE, 0.0, ""
)  # node 0 leaves a job that goes on when its npurun is started again


class Leader:
    """The leader of a job's nodes: a context manager, and a thread of node 0's launcher."""

    def __init__(self, launch: Launch, secret: bytes) -> None:
        self._launch = launch
        self._options = launch.options
        self._secret = secret
        self._ledger = Ledger(launch.options)
        port = master_port(launch.options)
        self._listener = ports.listen((launch.options.master_addr,), (port, port))
        self._events: queue.Queue[tuple[Link, dict[str, Any] | None]] = queue.Queue(_MOST_EVENTS)
        self._nodes: dict[int, Link] = {}
        self._idle: set[int] = set()
        self._all = self._expected = set(range(launch.options.nnodes))
        self._running: set[int] = set()
        self._outcomes: dict[int, Outcome] = {}
        self._lost: str | None = None
        self._preempted: set[int] = set()  # nodes that are taken away, of the running attempt
        self._is_stopping = False
        self._deadline: float | None = None
        self._is_leaving = False  # this node has been taken away
        self._signal: int | None = None
        self._thread = threading.Thread(target=self._run, name="npurun-leader", daemon=True)

    @property
    def address(self) -> str:
        host = str(self._listener.getsockname()[0])
        return "127.0.0.1" if host in ("::", "0.0.0.0") else host

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
        self._events.put((link, None))

    def _say_alive(self) -> None:
        while self._thread.is_alive():
            self._send(list(self._nodes), "alive")
            time.sleep(limits.NODE_ALIVE_SECONDS)

    def _send(self, to: Iterable[int], do: str, **fields: Any) -> None:
        for link in filter(None, map(self._nodes.get, list(to))):
            link.send(do, **fields)

    def _run(self) -> None:
        try:
            decision = self._lead()
        except Exception:
            decision = Decision(FAILED, None, f"npurun failed on node 0:\n{traceback.format_exc()}")
        words = self._ledger.last_words(decision)
        for node, link in self._nodes.items():
            if decision.wait is None:
                link.end("over", code=decision.code, text=words)
            elif node == 0:
                link.end("leave", code=decision.code, text=words)
            else:
                link.end("say", text="node 0 is taken away: its npurun has to be started again")
        deadline = time.monotonic() + limits.NODE_LAST_MESSAGE_SECONDS
        while (
            not all(link.is_lost for link in self._nodes.values()) and time.monotonic() < deadline
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
                last = self._ledger.attempts[-1:]
                fewest, rejoin, most = (
                    self._options.fewest_nodes,
                    self._options.rejoin_timeout,
                    self._options.nnodes,
                )
                text = (
                    f"node(s) {ranges(self._all - self._idle)} did not come within {rejoin:g} s (--rejoin-timeout); "
                    f"there are only {ranges(self._idle)}, and the job needs {fewest}.\n"
                    "What to do: look at the output of npurun on these nodes; let the cluster start npurun there "
                    f"again; or allow fewer nodes (--nnodes MIN:{most})."
                )
                return Decision(last[0].code if last and last[0].preempted else FAILED, None, text)
            try:
                place = prepare_meeting(self._options, self._ledger.count, nodes)
            except (OSError, ClusterError, ValueError) as error:
                return Decision(USAGE, None, str(error))
            with place:
                decision = self._attempt(place)
            if decision.wait is None or 0 in self._preempted:
                return decision
            place.end()
            self._expected = set(nodes)
            self._send(self._nodes, "say", text=decision.text)
            wait = decision.wait

    def _gather(self, wait: float) -> tuple[int, ...] | None:
        """Wait a while, and for the expected nodes; return those that are there, or None if they are too few."""
        began = now = time.monotonic()
        deadline = began + max(wait, self._options.rejoin_timeout)
        is_told, fewest = False, self._options.fewest_nodes
        while self._signal is None and not self._is_leaving and now < deadline:
            missing = (self._expected if len(self._idle) >= fewest else self._all) - self._idle
            if not missing and now >= began + wait:
                break
            if missing and not is_told and now >= began + limits.NODE_NOTICE_SECONDS:
                is_told = True
                text = f"waiting for node {ranges(missing)}, for {deadline - now:.0f} s at most"
                self._send(self._idle, "say", text=text)
            self._handle(
                min(deadline, now + limits.NODE_PAUSE_SECONDS if missing else began + wait)
            )
            now = time.monotonic()
        return tuple(sorted(self._idle)) if len(self._idle) >= fewest else None

    def _attempt(self, place: Meeting) -> Decision:
        began = time.time()
        self._running, self._outcomes, self._lost = set(place.nodes), {}, None
        self._preempted, self._is_stopping, self._deadline = set(), False, None
        self._idle -= self._running
        self._send(
            place.nodes,
            "plan",
            count=place.count,
            nodes=place.nodes,
            job_id=place.job_id,
            port=place.port,
        )
        while self._running:
            if self._handle(self._deadline):
                continue
            if not self._is_stopping:
                self._stop(
                    f"node(s) {ranges(self._running)} did not end although the others were asked to stop"
                )
                continue
            for node in list(self._running):
                self._nodes[node].close()  # a frozen npurun sees it when it continues
                self._lose(node, "does not answer")
        return self._ledger.add(
            began,
            place.nodes,
            self._outcomes.values(),
            self._launch.step(),
            self._lost,
            sorted(self._preempted),
        )

    def _stop(self, why: str) -> None:
        if not self._is_stopping:
            self._is_stopping = True
            limit = (
                max(self._options.grace, self._options.preempt_timeout) + limits.NODE_STOP_SECONDS
            )
            self._deadline = time.monotonic() + limit
            self._send(self._running, "stop", why=why)

    def _next_event(self, until: float | None) -> tuple[Link, dict[str, Any] | None] | None:
        try:
            return self._events.get(
                timeout=None if until is None else max(0.0, until - time.monotonic())
            )
        except queue.Empty:
            return None

    def _handle(self, until: float | None) -> bool:
        """Handle the next message; return False if none comes before a time."""
        event = self._next_event(until)
        if event is None:
            return False
        link, message = event
        node = next((node for node, known in self._nodes.items() if known is link), None)
        if message is not None and message["do"] == "hello":
            self._register(link, message)
        elif node is not None and message is None:
            self._lose(
                node, "is gone: its npurun ended or was killed, or its host can't be reached"
            )
        elif node is not None and message is not None:
            self._act(node, message)
        return True

    def _act(self, node: int, message: dict[str, Any]) -> None:
        if message["do"] == "interrupted":
            self._signal = message["signal"]
        elif node not in self._running:
            return
        elif message["do"] == "failed":
            self._stop(f"node {node}: {message['what']}")
        elif message["do"] == "preempted" and self._options.outlives_preemption:
            self._preempted.add(node)  # its ranks end the attempt, resumable or not
        elif message["do"] == "outcome":
            failure = Failure(**message["failure"]) if message["failure"] else None
            outcome = Outcome(
                message["code"], message["interrupted"], message["preempted"], failure
            )
            self._outcomes[node] = outcome
            self._running.discard(node)
            self._idle.add(node)
            if outcome.code not in (0, RESUMABLE):
                self._stop(f"node {node}: {failure or 'stopped'}")
            elif outcome.code == RESUMABLE and self._deadline is None:
                self._deadline = time.monotonic() + self._options.preempt_timeout

    def _register(self, link: Link, hello: dict[str, Any]) -> None:
        node = hello["node"]
        ours = {
            "nproc": self._options.nproc_per_node,
            "most": self._options.nnodes,
            "version": __version__,
        }
        wrong = [
            f"{name} {hello[name]} (node 0: {value})"
            for name, value in ours.items()
            if hello[name] != value
        ]
        if not wrong and not 0 <= node < self._options.nnodes:
            wrong = [f"it is not one of nodes 0 to {self._options.nnodes - 1}"]
        if not wrong and node == 0 and 0 in self._nodes:
            wrong = ["node 0 has one already"]
        if wrong:
            link.end(
                "over", code=USAGE, text=f"node {node} doesn't match node 0: {', '.join(wrong)}"
            )
            return
        if node in self._nodes:
            self._nodes[node].end(
                "over", code=USAGE, text=f"another npurun was started as node {node}"
            )
            self._lose(node, "was started again")
        self._nodes[node] = link
        self._idle.add(node)
        if self._running:
            at_work = f"the job is running on node(s) {ranges(self._running)}; this node joins at the next restart"
            link.send("say", text=at_work)
        elif hello["count"] > self._ledger.count:  # this launcher has been started again
            self._ledger.count, self._expected = (
                hello["count"],
                self._all.intersection(hello["nodes"]),
            )

    def _lose(self, node: int, how: str) -> None:
        del self._nodes[node]
        self._idle.discard(node)
        self._is_leaving = self._is_leaving or node == 0
        if node in self._running:
            self._running.discard(node)
            self._lost = self._lost or f"node {node} {how}"
            self._stop(f"node {node} {how}")
