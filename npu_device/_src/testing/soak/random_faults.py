"""Faults at random: kills, stops and continues the ranks that launchers have here, and disturbs their network.

Nothing here knows what the ranks do.
"""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

from npu_device._src.cluster.time_limits import (
    FAULT_POLL_SECONDS,
    RECOVERY_SECONDS,
    SETTLING_SECONDS,
)
from npu_device._src.testing.faults import SIGNALS, strike
from npu_device._src.testing.leaks import children_of
from npu_device._src.testing.soak.network import Here
from npu_device._src.testing.soak.npuruns import CHANGES, Launchers
from npu_device._src.testing.soak.running import Rank, ranks_of

_LASTING = ("stop", "drop", "delay")


@dataclass
class Disturbance:
    """Something that was done to a rank, or to the network of a node.

    Attributes:
        after: seconds since the first start of the ranks.
        fault: one of ``faults.SIGNALS``, of the faults of the network, or of ``npuruns.CHANGES``.
        where: ``"rank 1"`` or ``"node 1"``.
        attempt: how often the job had been started again.
        seconds: until it was taken back; 0 for a fault that can't be.
        has_ended: the attempt ended before the next fault; if not, the ranks rode it out.
        recovered: seconds until all ranks ran again in another attempt; None if there was none.
    """

    after: float
    fault: str
    where: str
    attempt: int
    seconds: float = 0.0
    has_ended: bool = False
    recovered: float | None = None


@dataclass
class RandomFaults:
    """Faults at random times; the intervals, kinds and places follow from the random numbers."""

    _launchers: Launchers
    _network: Here
    _mtbf: float
    _random: Random
    _faults: list[str]  # those that aren't possible here are removed
    _longest_seconds: float
    disturbances: list[Disturbance] = field(default_factory=list)  # the faults so far
    attempt: int = 0  # how often the job has been started again, as far as seen
    # Set by whoever waits for the job.
    job_has_ended: threading.Event = field(default_factory=threading.Event)
    _began: float = 0.0
    _settled: float = 0.0

    def run(self, seconds: float) -> None:
        """Make faults for some seconds from the start of the ranks; watch the ranks until the job is over."""
        while not self._ranks() and not self.job_has_ended.wait(FAULT_POLL_SECONDS):
            pass
        self._began = time.monotonic()
        due = self._began
        while self._faults and not self.job_has_ended.is_set():
            # A fault that is late, since ranks weren't there, doesn't make those after it come at
            # once.
            due = max(due + self._random.expovariate(1 / self._mtbf), time.monotonic())
            if due - self._began > seconds:
                break
            # Drawn before it is known how many ranks run, so that the seed alone decides.
            fault = self._random.choice(self._faults)
            share = self._random.random()
            seconds_of_fault = self._random.uniform(0.1, self._longest_seconds)
            self._watch(due)
            ranks = self._all_ranks()
            if not self.job_has_ended.is_set() and ranks:
                self._make(fault, share, seconds_of_fault, ranks)
        self._watch(float("inf"))

    def _make(self, fault: str, share: float, seconds: float, ranks: Sequence[Rank]) -> None:
        """Make a fault, of the rank or node at a share of all, and take it back after some seconds."""
        nodes = self._network.nodes
        # Drawn as a share, so that the seed doesn't have to know how many ranks there are.
        victim = ranks[int(share * len(ranks))]
        node = nodes[int(share * len(nodes))]
        where = f"node {node}"
        after = time.monotonic() - self._began
        try:
            if fault in SIGNALS:
                where = f"rank {victim.rank}"
                strike(fault, victim.pid, seconds)
            elif fault in CHANGES:
                where = f"node {self._launchers.change(fault, share)}"
            else:
                launcher = self._launchers.pids[node]
                # npurun's children without a command line have ended.
                children = (pid for pid, command in children_of(launcher).items() if command)
                self._network.begin(fault, node, [launcher, *children])
        except (ProcessLookupError, KeyError):
            # The process has ended, or isn't connected yet; or no node can leave or join.
            return
        except (OSError, subprocess.CalledProcessError) as error:
            _say(f"{fault} is not possible here, and left out from now on: {error}")
            self._faults.remove(fault)
            return
        disturbance = Disturbance(after, fault, where, self.attempt, has_ended=fault == "kill")
        duration = ""
        if fault in _LASTING:
            disturbance.seconds = seconds
            duration = f" for {seconds:.1f} s"
        self.disturbances.append(disturbance)
        _say(f"{after:7.1f} s: {fault} {where}{duration}")
        self._watch(time.monotonic() + disturbance.seconds)
        if fault in self._network.faults:
            self._network.end(fault, node)
            # An attempt may still end of the fault until then.
            self._settled = time.monotonic() + SETTLING_SECONDS

    def _is_settled(self) -> bool:
        return time.monotonic() >= self._settled or self.disturbances[-1].recovered is not None

    def _all_ranks(self) -> list[Rank]:
        """Return the ranks when all run and what came of the last fault is known; if some don't come, the others."""
        deadline = time.monotonic() + RECOVERY_SECONDS
        while True:
            ranks = self._observe_ranks()
            if (
                (_is_whole(ranks) and self._is_settled())
                or time.monotonic() >= deadline
                or self.job_has_ended.wait(FAULT_POLL_SECONDS)
            ):
                return ranks

    def _watch(self, until: float) -> None:
        while not self.job_has_ended.is_set() and time.monotonic() < until:
            self._observe_ranks()
            self.job_has_ended.wait(min(FAULT_POLL_SECONDS, max(0.0, until - time.monotonic())))

    def _observe_ranks(self) -> list[Rank]:
        """Return the ranks that run now, and note what came of the last fault."""
        ranks = self._ranks()
        if ranks:
            self.attempt = max(self.attempt, ranks[-1].attempt)
        if self.disturbances and self.attempt > self.disturbances[-1].attempt:
            disturbance = self.disturbances[-1]
            disturbance.has_ended = True
            if disturbance.recovered is None and _is_whole(ranks):
                disturbance.recovered = time.monotonic() - self._began - disturbance.after
        return ranks

    def _ranks(self) -> list[Rank]:
        ranks = [rank for launcher in self._launchers.pids.values() for rank in ranks_of(launcher)]
        self._network.follow(ranks)
        return ranks


def _say(text: str) -> None:
    print(f"soak: {text}", flush=True)


def _is_whole(ranks: Sequence[Rank]) -> bool:
    # Ranks of two attempts may be there for a moment.
    sizes = {(rank.attempt, rank.size) for rank in ranks}
    return [size for _, size in sizes] == [len(ranks)]
