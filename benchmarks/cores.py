"""Whether two cores share a cache, which a virtual machine changes within seconds, and sums of large tensors follow."""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from npu_device._src.check.core_distance import SHARES_CACHE_BELOW, core_distance

SHARED = "shared cache"
APART = "no shared cache"
CHANGED = "shared cache or not"  # it changed during the measurement
UNKNOWN = "caches not measured"  # also on a machine with one core
STATES = (SHARED, APART, CHANGED, UNKNOWN)
"""The states of two cores."""

_SOURCE = Path(__file__).with_name("pingpong.c")
_SHARED_BELOW = 150  # nanoseconds in C: some 55 to 85, or 330 to 390 (AMD EPYC, 2026-11-27)
_LIMIT_SECONDS = 10.0


@dataclass(frozen=True)
class Distance:
    """How long a value takes from one core to another and back."""

    state: str
    nanoseconds: float | None


def measure() -> Distance:
    """Measure the distance of the first two cores that this process may use."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        return Distance(UNKNOWN, None)
    program = _program()
    if program is None:
        return _distance(core_distance(*cores), SHARES_CACHE_BELOW)
    command = [program, *map(str, cores)]
    try:
        measured = subprocess.run(
            command, capture_output=True, text=True, timeout=_LIMIT_SECONDS, check=True
        )
        return _distance(float(measured.stdout), _SHARED_BELOW)
    except (OSError, subprocess.SubprocessError, ValueError):
        return Distance(UNKNOWN, None)


def _distance(nanoseconds: float | None, shared_below: float) -> Distance:
    if nanoseconds is None:
        return Distance(UNKNOWN, None)
    return Distance(SHARED if nanoseconds < shared_below else APART, nanoseconds)


@functools.cache
def _program() -> str | None:
    """Return the program in C, compiled; None without a compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return None
    directory = tempfile.mkdtemp(prefix="npu_device_benchmarks_")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    program = os.path.join(directory, "pingpong")
    command = [compiler, "-O2", "-pthread", str(_SOURCE), "-o", program]
    compiled = subprocess.run(command, capture_output=True, check=False)
    return program if compiled.returncode == 0 else None
