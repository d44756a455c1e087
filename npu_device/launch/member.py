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
from npu_device.launch.attempt import FAILED, Attempt, Launch, Outcome
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
        self._nodes = tuple(range(launch.options.nnodes))  # of the newest attempt
        self._count = 0  # of the next attempt, as far as this node knows
        self._running: int | None = None
        self._ending: dict[str, Any] | None = None  # the leader's last message
        self._outcome = Outcome(0)  # of the newest attempt

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
        """Wait for the order to run an attempt."""
        while self._ending is None or not self._launch.events.empty():
            if self._ending is None and (self._link is None or self._link.is_lost):
                self._connect()
            event = self._event(NODE_SILENT_SECONDS)
            link = self._link
            if event is None and link is not None and time.monotonic() - link.heard > NODE_SILENT_SECONDS:
                self._say(
                    f"node 0 has said nothing for {NODE_SILENT_SECONDS:g} s: its npurun is stopped, or its host hangs"
                )
                link.close()
                link.is_lost = True
            if not isinstance(event, dict):
                continue
            if event["do"] == "plan":
                return self._plan(event)
            self._say(event["text"])
        if self._ending["text"]:
            self._say(self._ending["text"])
        raise _End(self._ending["code"])

    def _event(self, seconds: float) -> Any:
        """Return the next event, or None if there is none for some time; end at a signal."""
        try:
            event = self._launch.events.get(timeout=seconds)
        except queue.Empty:
            return None
        if isinstance(event, int):
            is_request = event == self._options.preempt_signal
            if self._link is not None and not (is_request and self._options.outlives_preemption):
                self._link.send("interrupted", signal=event)
            stopped = self._outcome.interrupted or (is_request and self._outcome.code == RESUMABLE)
            raise _End(self._outcome.code if stopped else 128 + event)
        return event

    def _plan(self, plan: dict[str, Any]) -> Meeting:
        nodes = tuple(plan["nodes"])
        change = ledger.change(self._nodes, nodes, self._options.nproc_per_node)
        if change:
            self._say(change)
        self._nodes, self._count = nodes, plan["count"] + 1
        return Meeting(plan["job_id"], plan["port"], None, None, nodes, plan["count"])

    def _attempt(self, place: Meeting) -> None:
        link = self._link
        assert link is not None
        if link.is_lost:
            return
        outcome = self._outcome = Attempt(self._launch, place, lambda kind, what: link.send(kind, what=what)).run()
        self._running = None
        link.send("outcome", **asdict(outcome))
        if outcome.preempted and self._options.outlives_preemption and self._options.node_rank > 0:
            raise _End(outcome.code)

    # The connection

    def _connect(self) -> None:
        if self._outcome.interrupted:
            raise _End(self._outcome.code)
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
                self._event(NODE_PAUSE_SECONDS)
        self._link.send(
            "hello",
            node=self._options.node_rank,
            nproc=self._options.nproc_per_node,
            most=self._options.nnodes,
            version=__version__,
            count=self._count,
            nodes=self._nodes,
        )
        threading.Thread(target=self._receive, args=(self._link,), name="npurun-member", daemon=True).start()

    def _receive(self, link: Link) -> None:
        for message in link.messages():
            if message["do"] == "stop":
                self._launch.events.put(Stop(message["why"], self._running))
            elif message["do"] == "over":
                self._ending = message
                self._launch.events.put(Stop("node 0 has ended the part of the job on this node", self._running))
            elif message["do"] != "alive":
                if message["do"] == "plan":
                    self._running = message["count"]
                self._launch.events.put(message)
        self._launch.events.put(Stop("lost the connection to node 0", self._running))
