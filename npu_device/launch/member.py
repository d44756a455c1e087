"""One node's side of a job on several nodes that may restart: runs the attempts that ``leader`` orders."""

from __future__ import annotations

import signal
import time
from typing import NoReturn

from npu_device._src.cluster.rank_errors import RESUMABLE
from npu_device._src.cluster.time_limits import NODE_PAUSE_SECONDS, NODE_SILENT_SECONDS
from npu_device._src.threads import start_thread
from npu_device._src.version import __version__
from npu_device.launch import last_copy, ledger
from npu_device.launch.attempt import Attempt
from npu_device.launch.events import handle_next
from npu_device.launch.neighbour import Neighbour
from npu_device.launch.node_protocol import (
    AttemptPlan,
    JobEnd,
    JobInterrupted,
    Link,
    NodeEnd,
    NodeHello,
    NodeOutcome,
    Notice,
    StopOrder,
    reach,
)
from npu_device.launch.preparation import FAILED, Launch, Rendezvous, master_port


class NodeLeavesError(SystemExit):
    """The npurun of this node ends, and the job continues when it is started again, or without it."""


class Member:
    """The launcher of a node, led by the one of node 0; it ends with SystemExit."""

    def __init__(self, launch: Launch, leader: str, neighbour: Neighbour) -> None:
        self._launch = launch
        self._neighbour = neighbour
        self._options = launch.options
        self._say = launch.console.say
        self._leader = (leader, master_port(launch.options))
        self._link: Link | None = None
        reporter = launch.reporter
        # The nodes of the newest attempt.
        self._nodes = reporter.nodes or range(launch.options.nnodes)
        self._count = reporter.count  # number of the next attempt, as far as this node knows
        self._plan: AttemptPlan | None = None  # the attempt that node 0 has ordered
        self._ending: JobEnd | None = None  # the leader's last message
        self._outcome = NodeOutcome(0)  # outcome of the newest attempt

    def run(self) -> NoReturn:
        try:
            while True:
                self._run_attempt(self._next_plan())
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

    def _next_plan(self) -> AttemptPlan:
        """Wait for the order to run an attempt."""
        # Messages that came before the last are still handled.
        self._plan = None
        while self._ending is None or not self._launch.events.empty():
            if self._ending is None and (self._link is None or self._link.is_lost):
                self._connect()
            has_event = handle_next(
                self._launch.events,
                {
                    signal.Signals: self._on_signal,
                    AttemptPlan: self._on_plan,
                    Notice: self._on_notice,
                },
                time.monotonic() + NODE_SILENT_SECONDS,
            )
            if not has_event:
                self._check_silence()
            if self._plan is not None:
                return self._plan
        if self._ending.text:
            self._say(self._ending.text)
        if isinstance(self._ending, NodeEnd):
            raise NodeLeavesError(self._ending.code)
        raise SystemExit(self._ending.code)

    def _check_silence(self) -> None:
        link = self._link
        if link is None or time.monotonic() - link.received_at <= NODE_SILENT_SECONDS:
            return
        self._say(
            f"node 0 has said nothing for {NODE_SILENT_SECONDS:g} s: its npurun is stopped, or its host hangs"
        )
        link.close()

    def _on_plan(self, plan: AttemptPlan) -> None:
        change = ledger.change(self._nodes, plan.nodes, self._options.nproc_per_node)
        if change and not plan.saves_copies:
            self._say(change)
        self._nodes = plan.nodes
        self._count = plan.count + 1
        # The nodes send their copies around in a circle.
        index = (plan.nodes.index(self._options.node_rank) + 1) % len(plan.nodes)
        host, _, copies_port = plan.copies[index].rpartition(" ")
        address = None
        # A node that has told no port takes no copies.
        if len(plan.nodes) > 1 and copies_port.isdecimal():
            # Node 0 is where this node has reached it.
            address = host or self._leader[0], int(copies_port)
        self._neighbour.send_to(address)
        self._plan = plan

    def _on_notice(self, notice: Notice) -> None:
        self._say(notice.text)

    def _on_signal(self, signum: int) -> None:
        """Let the job end, between two attempts; without node 0, or with another signal, this node ends at once."""
        is_request = signum == self._options.preempt_signal
        code = 128 + signum
        if self._outcome.is_interrupted or (is_request and self._outcome.code == RESUMABLE):
            code = self._outcome.code
        if is_request and self._options.outlives_preemption:
            raise NodeLeavesError(code)
        if self._link is not None:
            self._link.send(JobInterrupted(signum))
        if self._link is None or self._link.is_lost or self._outcome.is_interrupted:
            raise SystemExit(code)
        self._outcome = NodeOutcome(code, is_interrupted=True)

    def _run_attempt(self, plan: AttemptPlan) -> None:
        link = self._link
        if link is None or link.is_lost:
            return
        outcome = self._outcome
        rendezvous = Rendezvous(plan)
        if plan.saves_copies:
            launch = last_copy.launch_of_writers(self._launch)
            outcome = Attempt(launch, rendezvous).run()
        elif not outcome.is_interrupted:
            # The order of an attempt may cross a signal.
            outcome = Attempt(self._launch, rendezvous, link.send).run()
            self._outcome = outcome
        link.send(outcome)
        outlives = self._options.outlives_preemption and not plan.saves_copies
        if outcome.is_preempted and outlives and self._options.node_rank > 0:
            raise NodeLeavesError(outcome.code)

    def _connect(self) -> None:
        if self._outcome.is_interrupted:
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
            NodeHello(
                node=self._options.node_rank,
                nproc=self._options.nproc_per_node,
                most=self._options.nnodes,
                version=__version__,
                count=self._count,
                nodes=list(self._nodes),
                copies=self._neighbour.port,
            )
        )
        start_thread("npurun-member", self._receive, link)

    def _reach_leader(self, seconds: float) -> Link:
        deadline = time.monotonic() + seconds
        while True:
            try:
                return reach(self._leader, self._launch.secret)
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
            handle_next(
                self._launch.events,
                {signal.Signals: self._on_signal},
                time.monotonic() + NODE_PAUSE_SECONDS,
            )

    def _receive(self, link: Link) -> None:
        """Make events of the messages of node 0."""
        put = self._launch.events.put
        for message in link.messages():
            if isinstance(message, JobEnd):
                self._ending = message
                put(StopOrder("node 0 has ended the part of the job on this node"))
            else:
                put(message)
        # Reading ends only with the connection.
        put(StopOrder("lost the connection to node 0"))
