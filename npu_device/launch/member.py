"""One node's side of a job on several nodes that may restart: runs the attempts that ``leader`` orders."""

from __future__ import annotations

import queue
import threading
import time
from dataclasses import asdict
from typing import Any

from npu_device._src.cluster.errors import RESUMABLE
from npu_device._src.cluster.time_limits import NODE_PAUSE_SECONDS, NODE_SILENT_SECONDS
from npu_device._src.version import __version__
from npu_device.launch import ledger, meeting, node_links
from npu_device.launch.attempt import FAILED, USAGE, Attempt, Launch
from npu_device.launch.ledger import Ended
from npu_device.launch.meeting import Meeting
from npu_device.launch.node_links import Link
from npu_device.launch.supervisor import Stop


class _End(Exception):
    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class Member:
    """The launcher of a node, led by the one of node 0."""

    def __init__(self, launch: Launch, secret: bytes, leader: str) -> None:
        self._launch = launch
        self._options = launch.options
        self._say = launch.console.say
        self._secret = secret
        self._leader = leader, meeting.master_port(launch.options)
        self._link: Link | None = None
        self._attempts: list[dict[str, Any]] = []
        self._last: dict[str, Any] | None = None
        self._running: int | None = None
        self._ending: dict[str, Any] | None = None  # the leader's last message
        self._code: int | None = None  # what this node ends with once a signal has asked it to
        self._is_resumable = False  # the last attempt was stopped on request

    def run(self) -> int:
        try:
            while True:
                self._attempt(self._next())
        except _End as end:
            return end.code
        finally:
            if self._link is not None:
                self._link.close()

    def _next(self) -> Meeting:
        while self._ending is None or not self._launch.events.empty():
            if self._ending is None and (self._link is None or self._link.is_lost):
                self._connect()
            event = self._event()
            if isinstance(event, int):
                self._on_signal(event)
            if not isinstance(event, dict):
                continue
            if event["do"] == "plan":
                return self._plan(event)
            self._say(str(event["text"]))
        over = self._ending
        if over["do"] == "refused":
            self._say(str(over["text"]))
            raise _End(USAGE)
        if over["text"]:
            self._say(over["text"])
        if len(over["attempts"]) > 1:
            self._say(ledger.summary([Ended.read(fields) for fields in over["attempts"]]))
        raise _End(int(over["code"]))

    def _event(self) -> Any:
        """Wait for the next event; None if node 0 is silent, whose connection counts as lost then."""
        link = self._link
        try:
            return self._launch.events.get(timeout=NODE_SILENT_SECONDS)
        except queue.Empty:
            if link is not None and time.monotonic() - link.heard > NODE_SILENT_SECONDS:
                self._say(
                    f"node 0 has said nothing for {NODE_SILENT_SECONDS:g} s: its npurun is stopped, or its host hangs"
                )
                link.close()
                link.is_lost = True
            return None

    def _plan(self, plan: dict[str, Any]) -> Meeting:
        nodes = tuple(plan["nodes"])
        before = self._last["nodes"] if self._last else range(self._options.nnodes)
        change = ledger.change(before, nodes, self._options.nproc_per_node)
        if change:
            self._say(change)
        self._attempts = plan["attempts"]
        self._last = {"count": plan["count"], "began": time.time(), "nodes": nodes, "preempted": ()}
        return Meeting(plan["job_id"], plan["port"], None, None, nodes, plan["count"])

    def _attempt(self, place: Meeting) -> None:
        link = self._link
        assert link is not None
        if link.is_lost:
            return
        outcome = Attempt(self._launch, place, lambda kind, what: link.send(kind, what=what)).run()
        self._running = None
        self._is_resumable = outcome.code == RESUMABLE
        if outcome.interrupted:
            self._code = outcome.code
        link.send("outcome", **asdict(outcome))

    def _on_signal(self, number: int) -> None:
        if self._link is not None:
            leaves = number == self._options.preempt_signal and self._options.outlives_preemption
            self._link.send("preempted" if leaves else "interrupted", signal=number)
        raise _End(self._code_of(number) if self._code is None else self._code)

    def _code_of(self, number: int) -> int:
        return RESUMABLE if self._is_resumable and number == self._options.preempt_signal else 128 + number

    # The connection

    def _connect(self) -> None:
        if self._code is not None:
            raise _End(self._code)
        seconds = self._options.rejoin_timeout
        if self._link is not None:
            self._link.close()
            self._link = None
            self._say(f"lost the connection to node 0: trying to reach it again for {seconds:g} s (--rejoin-timeout)")
        deadline = time.monotonic() + seconds
        while self._link is None:
            try:
                self._link = node_links.connect(*self._leader, self._secret)
            except OSError as error:
                if time.monotonic() >= deadline:
                    host, port = self._leader
                    self._say(
                        f"node 0 could not be reached at {host}, port {port}, within {seconds:g} s "
                        f"(--rejoin-timeout): {error}.\n"
                        "What to do: look at the output of npurun there; compare --master-addr, --master-port and the "
                        "secret; let the cluster start npurun there again."
                    )
                    raise _End(FAILED) from None
                self._pause()
        self._link.send(
            "hello",
            node=self._options.node_rank,
            nproc=self._options.nproc_per_node,
            most=self._options.nnodes,
            version=__version__,
            attempts=self._attempts,
            last=self._last,
        )
        threading.Thread(target=self._receive, args=(self._link,), name="npurun-member", daemon=True).start()

    def _take(self, message: dict[str, Any]) -> None:
        do = message["do"]
        if do == "stop":
            self._launch.events.put(Stop(str(message["why"]), self._running))
        elif do == "plan":
            self._running = message["count"]
            self._launch.events.put(message)
        elif do == "preempted":  # while the ranks run
            self._last = self._last and {**self._last, "preempted": message["nodes"]}
        elif do == "say":
            self._attempts = message.get("attempts", self._attempts)  # from a node 0 that is taken away
            self._launch.events.put(message)
        elif do in ("over", "refused"):
            self._ending = message
            self._launch.events.put(Stop("node 0 has ended the part of the job on this node", self._running))

    def _pause(self) -> None:
        try:
            event = self._launch.events.get(timeout=NODE_PAUSE_SECONDS)
        except queue.Empty:
            return
        if isinstance(event, int):
            raise _End(self._code_of(event))

    def _receive(self, link: Link) -> None:
        for message in link.messages():
            self._take(message)
        self._launch.events.put(Stop("lost the connection to node 0", self._running))
