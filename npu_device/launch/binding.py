"""Binds the ranks of this node to cores, as ``--bind-to`` says, tells TensorFlow how many threads fit, and lets the C
library write large copies past the cache.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence

from npu_device._src import environment
from npu_device._src.machine.core_sets import (
    AUTO,
    core_sets,
    cpus_of,
    described,
    threads_of_rank,
)
from npu_device._src.machine.topology import has_amd_processor, read_machine
from npu_device.launch.arguments import Options

_TUNABLE = "glibc.cpu.x86_non_temporal_threshold"
_PAST_CACHE_BYTES = 256 << 10
"""Copies from this size on are written past the cache: slots of shared memory are larger, messages smaller."""


class Binding:
    """The cores of the ranks of this node; ValueError if they can't be divided."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._machine = read_machine()
        ranks = options.nproc_per_node
        self._sets = core_sets(self._machine, ranks, options.bind_to)
        # None unless the ranks have sets of cores, or a quota, which the ranks themselves know less well.
        self._threads = threads_of_rank(self._machine, ranks, self._sets)

    def lines(self, ranks: Sequence[int]) -> list[str]:
        """Return what is said at the start, of the ranks of this node."""
        lines = [
            f"rank {rank}: {described(core_set, self._machine)}"
            for rank, core_set in zip(ranks, self._sets)
        ]
        if self._options.bind_to == AUTO and not self._sets and len(ranks) > 1:
            lines.append(
                "--bind-to auto: nothing is bound: there are not several sockets, NUMA nodes or L3 caches among which "
                f"{len(ranks)} ranks can be divided equally"
            )
        quota = self._machine.quota
        if quota is not None and self._machine.is_limited:
            lines.append(
                f"this process gets the time of {quota.cpus:g} of {len(self._machine.cores)} cores (a quota): "
                f"TensorFlow has {self._threads} thread(s) on each rank"
            )
        return lines

    def variables(self) -> dict[str, str]:
        """Return the variables of each rank."""
        if self._options.nproc_per_node > 1:
            variables = tunables_of_ranks()
            if self._threads is not None:
                # Within a job, npu.open() divides what is left.
                variables[environment.NPU_DEVICE_CORES.name] = str(self._threads)
            return variables
        # A single rank shares no memory. It need not open the device, but TensorFlow reads these itself.
        names = (environment.TF_NUM_INTRAOP_THREADS.name, environment.TF_NUM_INTEROP_THREADS.name)
        if self._threads is None or any(map(os.environ.get, names)):
            return {}
        return dict.fromkeys(names, str(self._threads))

    @contextlib.contextmanager
    def on_cores(self, local_rank: int) -> Iterator[None]:
        """Let processes that this thread starts in the block have the cores of a rank, from their first instruction on:
        memory then comes from their NUMA node.
        """
        if not self._sets:
            yield
            return
        # A thread of its own is not needed: only the calling one changes.
        thread_cores = os.sched_getaffinity(0)
        os.sched_setaffinity(0, cpus_of(self._sets[local_rank]))
        try:
            yield
        finally:
            os.sched_setaffinity(0, thread_cores)


def tunables_of_ranks() -> dict[str, str]:
    """Return the variable for ranks that share a host, which lets them copy past the cache, with the user's tunables;
    nothing if the user has decided.

    A sum in shared memory writes what another rank reads. Where the cores of the ranks share no cache, reading what
    lies in the cache of another core takes longer than reading it from memory: on AMD's processors. On Intel's it takes
    as long, and steps get slower (docs/notes.md).
    """
    tunables_of_user = os.environ.get("GLIBC_TUNABLES", "")
    choice = environment.NPU_DEVICE_TUNE_COPIES.get()
    is_wanted = choice == "on" or (choice == "auto" and has_amd_processor())
    if not is_wanted or _TUNABLE in tunables_of_user:
        return {}
    # The C library reads it when a process starts, so that a rank can't set it by itself.
    tunables = f"{_TUNABLE}={_PAST_CACHE_BYTES}"
    return {"GLIBC_TUNABLES": ":".join(filter(None, (tunables_of_user, tunables)))}
