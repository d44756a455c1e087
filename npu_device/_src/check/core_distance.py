"""How long a cache line takes from one core to another and back: tells whether they share a cache.

Run as a program, in a process of its own that imports nothing of this package: ``python core_distance.py 0 1`` prints
the nanoseconds between two cores. Two processes write to two words of a page in turn. The loop is Python's, which
adds some 130 ns of its own, and another 150 ns where the cores share no cache, since it looks at a word several times
before the new value arrives.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import signal
import statistics
import subprocess
import sys
import time

SHARES_CACHE_BELOW = 450
"""Nanoseconds: some 220 where two cores share a cache, some 750 where they don't (AMD EPYC, 2026-11-27)."""

_EXCHANGES = 200  # timed together
_TIMED = 150
_APART = 128  # bytes between the words: two lines, since processors may fetch lines in pairs
_LIMIT_SECONDS = 20


def core_distance(first: int, second: int) -> float | None:
    """Return the nanoseconds of an exchange between two cores; None where that can't be measured."""
    command = [sys.executable, "-S", "-E", __file__, str(first), str(second)]
    try:
        measured = subprocess.run(
            command, capture_output=True, text=True, timeout=2 * _LIMIT_SECONDS, check=True
        )
        return float(measured.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


def _exchange(own: ctypes.c_uint32, other: ctypes.c_uint32, begins: bool) -> list[float]:
    """Write numbers in turn with the other process; return the nanoseconds of an exchange, several together."""
    durations = []
    count = 0
    for _ in range(_TIMED):
        began = time.perf_counter()
        for _ in range(_EXCHANGES):
            count += 1
            if begins:
                own.value = count
            while other.value != count:
                pass
            if not begins:
                own.value = count
        durations.append((time.perf_counter() - began) / _EXCHANGES * 1e9)
    return durations


def _measure(first: int, second: int) -> float:
    memory = mmap.mmap(-1, mmap.PAGESIZE)
    words = [ctypes.c_uint32.from_buffer(memory, position * _APART) for position in range(2)]
    # The child inherits the core, and takes it along.
    os.sched_setaffinity(0, {second})
    child = os.fork()
    # The alarm ends a process whose partner is gone.
    signal.alarm(_LIMIT_SECONDS)
    if child == 0:
        with contextlib.suppress(BaseException):
            _exchange(words[1], words[0], begins=False)
        os._exit(0)
    os.sched_setaffinity(0, {first})
    # The median leaves out exchanges in which a process has lost its core for a while.
    nanoseconds = statistics.median(_exchange(words[0], words[1], begins=True))
    os.waitpid(child, 0)
    return nanoseconds


if __name__ == "__main__":
    print(_measure(int(sys.argv[1]), int(sys.argv[2])))
