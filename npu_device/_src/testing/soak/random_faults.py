"""Faults at random: kills, stops and continues the ranks that launchers have here, and disturbs their network.

Nothing here knows what the ranks do.
"""

from __future__ import annotations

import random
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Callable

from npu_device._src.cluster.time_limits import (
    FAULT_POLL_SECONDS,
    RECOVERY_SECONDS,
    SETTLING_SECONDS,
)
from npu_device._src.testing.faults import SIGNALS, strike
from npu_device._src.testing.leaks import children_of
from npu_device._src.testing.soak.network import Here
from npu_device._src.testing.soak.running import Rank, ranks_of

_LASTING = ("stop", "drop", "delay")


@dataclass
class Disturbance:
    """Something that was done to a rank, or to the network of a node.

    Attributes:
        after: seconds since the first start of the ranks.
        kind: one of ``faults.SIGNALS``, or of the faults of the network.
        where: ``"rank 1"`` or ``"node 1"``.
        attempt: how often the job had been started again.
        seconds: until it was taken back; 0 for a fault that can't be.
        ended: the attempt ended before the next fault; if not, the ranks rode it out.
        recovered: seconds until all ranks ran again in another attempt; None if there was none.
    """

    after: float
    kind: str
    where: str
    attempt: int
    seconds: float = 0.0
    ended: bool = False
    recovered: float | None = None


class RandomFaults:
    """Faults at random times; the intervals, kinds and places follow from the seed.

    Attributes:
        done: the faults so far.
        attempt: how often the job has been started again, as far as seen.
    """

    def __init__(
        self,
        launchers: Sequence[int],
        network: Here,
        mtbf: float,
        seed: int,
        kinds: Sequence[str],
        longest: float,
        say: Callable[[str], None],
    ) -> None:
        self.done: list[Disturbance] = []
        self.attempt = 0
        self._launchers = launchers
        self._network = network
        self._mtbf = mtbf
        self._random = random.Random(seed)
        self._kinds = list(kinds)
        self._longest = longest
        self._say = say
        self._began = 0.0
        self._settled = 0.0
        self._size = 1

    def run(self, seconds: float, over: threading.Event) -> None:
        """Make faults for some seconds from the start of the ranks; watch the ranks until the job is over."""
        while not self._ranks() and not over.wait(FAULT_POLL_SECONDS):
            pass
        self._began = due = time.monotonic()
        while self._kinds and not over.is_set():
            due = max(due + self._random.expovariate(1 / self._mtbf), time.monotonic())
            if due - self._began > seconds:
                break
            kind, place = self._random.choice(self._kinds), self._random.random()
            lasts = self._random.uniform(0.1, self._longest)
            self._watch(due, over)
            ranks = self._all_ranks(over)
            if not over.is_set() and ranks:
                self._make(kind, place, lasts, ranks, over)
        self._watch(float("inf"), over)

    def _make(
        self, kind: str, place: float, lasts: float, ranks: Sequence[Rank], over: threading.Event
    ) -> None:
        nodes = self._network.nodes
        victim, node = ranks[int(place * len(ranks))], nodes[int(place * len(nodes))]
        where = f"rank {victim.rank}" if kind in SIGNALS else f"node {node}"
        fault = Disturbance(
            time.monotonic() - self._began,
            kind,
            where,
            self.attempt,
            lasts if kind in _LASTING else 0.0,
        )
        try:
            if kind in SIGNALS:
                strike(kind, victim.pid, lasts)
            else:
                launcher = self._launchers[node]
                children = (pid for pid, command in children_of(launcher).items() if command)
                self._network.begin(kind, node, [launcher, *children])
        except ProcessLookupError:  # it has just ended, or isn't connected yet
            return
        except (OSError, subprocess.CalledProcessError) as error:
            self._say(f"{kind} is not possible here, and left out from now on: {error}")
            self._kinds.remove(kind)
            return
        fault.ended = kind == "kill"
        self.done.append(fault)
        self._say(
            f"{fault.after:7.1f} s: {kind} {where}"
            + (f" for {lasts:.1f} s" if fault.seconds else "")
        )
        self._watch(time.monotonic() + fault.seconds, over)
        if kind not in SIGNALS:
            self._network.end(kind, node)
            self._settled = time.monotonic() + SETTLING_SECONDS

    def _is_settled(self) -> bool:
        return time.monotonic() >= self._settled or self.done[-1].recovered is not None

    def _all_ranks(self, over: threading.Event) -> list[Rank]:
        """Return the ranks when all run and what came of the last fault is known; if some don't come, the others."""
        deadline = time.monotonic() + RECOVERY_SECONDS
        while True:
            ranks = self._look()
            if (
                (_is_whole(ranks, self._size) and self._is_settled())
                or time.monotonic() >= deadline
                or over.wait(FAULT_POLL_SECONDS)
            ):
                return ranks

    def _watch(self, until: float, over: threading.Event) -> None:
        while not over.is_set() and (left := until - time.monotonic()) > 0:
            self._look()
            over.wait(min(FAULT_POLL_SECONDS, left))

    def _look(self) -> list[Rank]:
        """Return the ranks that run now, and note what came of the last fault."""
        ranks = self._ranks()
        if ranks:
            self._size = max(self._size, len(ranks))
            self.attempt = max(self.attempt, ranks[-1].attempt)
        if self.done and self.attempt > self.done[-1].attempt:
            fault = self.done[-1]
            fault.ended = True
            if fault.recovered is None and _is_whole(ranks, self._size):
                fault.recovered = time.monotonic() - self._began - fault.after
        return ranks

    def _ranks(self) -> list[Rank]:
        ranks = [rank for launcher in self._launchers for rank in ranks_of(launcher)]
        self._network.follow(ranks)
        return ranks


def _is_whole(ranks: Sequence[Rank], size: int) -> bool:
    return len(ranks) == size and len({rank.attempt for rank in ranks}) == 1
