"""Measure the resources that a process holds: memory, descriptors, threads."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Sample:
    """The resources of a process.

    Attributes:
        memory: resident bytes.
        descriptors: open files and sockets.
        threads: the operating system's, without those of gRPC's pool, which takes one more whenever it is busy.
        mappings: of memory that ranks share.
    """

    memory: int
    descriptors: int
    threads: int
    mappings: int


def sample() -> Sample:
    """Look at this process. Garbage is collected, and freed memory given back, so that they don't count."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)
    with open("/proc/self/statm", encoding="utf-8") as statm:
        memory = int(statm.read().split()[1]) * os.sysconf("SC_PAGESIZE")
    with open("/proc/self/maps", encoding="utf-8") as maps:
        mappings = sum("memfd:npu_device" in line for line in maps)
    return Sample(memory, len(os.listdir("/proc/self/fd")), _threads(), mappings)


def _threads() -> int:
    names = []
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(FileNotFoundError), open(f"/proc/self/task/{task}/comm", encoding="utf-8") as comm:
            names.append(comm.read().strip())
    return sum(name != "event_engine" for name in names)
