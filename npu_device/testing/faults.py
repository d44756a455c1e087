"""Faults of ranks: kills, stops and continues the ranks that a launcher has on this machine, at random.

Nothing here knows what the ranks do. They are found as the launcher's children with a rank's environment.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Callable

_POLL_SECONDS = 0.05
_RECOVERY_SECONDS = 300.0


@dataclass(frozen=True)
class Rank:
    """A running rank.

    Attributes:
        pid: its process.
        rank: its number.
        attempt: how often the job has been started again.
    """

    pid: int
    rank: int
    attempt: int


@dataclass
class Fault:
    """Something that was done to a rank.

    Attributes:
        after: seconds since the first start of the ranks.
        kind: ``"kill"`` or ``"stop"``.
        rank: the rank.
        attempt: how often the job had been started again.
        stopped: seconds until a stopped rank was continued; 0 for a killed one.
        recovered: seconds until all ranks ran again; None if the job ended before.
    """

    after: float
    kind: str
    rank: int
    attempt: int
    stopped: float = 0.0
    recovered: float | None = None


def ranks_of(launcher: int) -> list[Rank]:
    """Return the running ranks of a launcher, by rank; Linux only."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdecimal() and _parent(int(entry)) == launcher:
            with contextlib.suppress(OSError, KeyError, ValueError):
                environment = _environment(int(entry))
                rank, attempt = int(environment["RANK_ID"]), int(environment.get("NPU_DEVICE_RESTART_COUNT") or 0)
                found.append(Rank(int(entry), rank, attempt))
    return sorted(found, key=lambda rank: rank.rank)


def _parent(pid: int) -> int | None:
    """Return the parent of a process that hasn't ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[1])


def _environment(pid: int) -> dict[str, str]:
    entries = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)


class Faults:
    """Faults at random times; the intervals, kinds and ranks follow from the seed.

    Args:
        launcher: process of the launcher.
        mtbf: mean time between faults, in seconds.
        seed: of the random numbers.
        kinds: which faults: ``"kill"``, ``"stop"``.
        longest_stop: seconds after which a stopped rank is continued at the latest.
        say: prints a line.
    """

    def __init__(
        self,
        launcher: int,
        mtbf: float,
        seed: int,
        kinds: Sequence[str],
        longest_stop: float,
        say: Callable[[str], None],
    ) -> None:
        self.done: list[Fault] = []
        self._launcher = launcher
        self._mtbf = mtbf
        self._random = random.Random(seed)
        self._kinds = kinds
        self._longest_stop = longest_stop
        self._say = say

    def run(self, seconds: float, over: threading.Event) -> None:
        """Make faults for some seconds from the start of the ranks, or until the job is over."""
        while not ranks_of(self._launcher) and not over.wait(_POLL_SECONDS):
            pass
        began = due = time.monotonic()
        size = 0
        while not over.is_set():
            due = max(due + self._random.expovariate(1 / self._mtbf), time.monotonic())
            kind = self._random.choice(list(self._kinds))
            place, stopped = self._random.random(), self._random.uniform(0.1, self._longest_stop)
            if due - began > seconds or over.wait(due - time.monotonic()):
                return
            ranks = ranks_of(self._launcher)
            size = max(size, len(ranks))
            if not ranks:  # between two attempts
                continue
            victim = ranks[int(place * len(ranks))]
            fault = Fault(time.monotonic() - began, kind, victim.rank, victim.attempt)
            if kind == "kill":
                if not _signal(victim.pid, signal.SIGKILL):
                    continue
            else:
                fault.stopped = stopped
                if not _signal(victim.pid, signal.SIGSTOP):
                    continue
            self.done.append(fault)
            self._say(f"{fault.after:7.1f} s: {kind} rank {victim.rank} (process {victim.pid})")
            if kind == "stop":
                over.wait(stopped)
                _signal(victim.pid, signal.SIGCONT)
            self._watch_recovery(fault, victim, size, over)

    def _watch_recovery(self, fault: Fault, victim: Rank, size: int, over: threading.Event) -> None:
        """Wait until all ranks run again; later faults may come before they have opened npu_device."""
        began = time.monotonic()
        while not over.is_set() and time.monotonic() < began + _RECOVERY_SECONDS:
            ranks = ranks_of(self._launcher)
            again = fault.kind == "stop" or all(rank.attempt > victim.attempt for rank in ranks)
            if len(ranks) == size and again:
                fault.recovered = time.monotonic() - began + fault.stopped
                return
            over.wait(_POLL_SECONDS)


def _signal(pid: int, number: int) -> bool:
    """Signal a process; return False if it has ended."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True
