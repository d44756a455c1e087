"""Cores, their threads, shared caches, NUMA nodes and sockets of this host, as far as this process may use them.

Linux tells them below ``/sys/devices/system``, and the quota of CPU time in the files of the control group. Virtual
machines may say anything there: it is good for a preference, not for a promise.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

from npu_device._src.wording import ranks_of

_UNKNOWN = -1


@dataclass(frozen=True)
class Core:
    """A physical core, and where it is.

    Attributes:
        first_cpu: its first hardware thread.
        cpus: numbers of its threads that this process may use.
        socket, numa: numbers of its processor and of its memory.
        l3cache: the first CPU that shares its last-level cache, or -1.
    """

    first_cpu: int
    cpus: tuple[int, ...]
    socket: int
    numa: int
    l3cache: int


@dataclass(frozen=True)
class Quota:
    """How much CPU time a control group gets: ``cpus`` at a time. Processes with one ``group`` share it."""

    cpus: float
    group: str


@dataclass(frozen=True)
class Machine:
    """Cores of a host, in the order of sockets, NUMA nodes and caches, and the quota, if there is one."""

    cores: tuple[Core, ...]
    quota: Quota | None = None

    @property
    def is_limited(self) -> bool:
        """Return True if the quota is below the cores."""
        return self.quota is not None and self.quota.cpus < len(self.cores)

    @property
    def cpus(self) -> int:
        """Return how many CPUs processes can use at a time: threads of cores, within the quota."""
        count = sum(len(core.cpus) for core in self.cores)
        if self.quota is None:
            return count
        return min(count, math.ceil(self.quota.cpus))

    def domains(self, level: str) -> list[list[Core]]:
        """Return the cores of each ``socket``, ``numa`` node or ``l3cache``; for ``core``, all of them together."""
        by_domain: dict[int, list[Core]] = {}
        for core in self.cores:
            by_domain.setdefault(getattr(core, level, 0), []).append(core)
        return list(by_domain.values())


def read_machine(root: Path = Path("/"), cpus: Collection[int] | None = None) -> Machine:
    """Read this host.

    Args:
        root: of the files, another one in tests.
        cpus: that may be used; by default this thread's.
    """
    # The CPUs of this thread are asked for, since a launcher or a cpuset may allow it fewer than the host has.
    if cpus is None:
        cpus = os.sched_getaffinity(0)
    # Each CPU has a folder of its own; only nodes list theirs.
    numa_nodes = _numa_nodes(root)
    cores = {}
    for cpu in sorted(cpus):
        folder = root / f"sys/devices/system/cpu/cpu{cpu}"
        # Some containers lack the file: then each CPU counts as a core.
        siblings = _numbers(folder / "topology/thread_siblings_list") or [cpu]
        threads = tuple(sibling for sibling in siblings if sibling in cpus)
        # Some virtual machines and ARM systems give -1 for an unknown socket.
        socket = max(0, _number(folder / "topology/physical_package_id"))
        first_cpu = siblings[0]
        numa_node = numa_nodes.get(cpu, 0)
        cores[first_cpu] = Core(first_cpu, threads, socket, numa_node, _l3cache(folder))
    ordered_cores = sorted(cores.values(), key=attrgetter("socket", "numa", "l3cache"))
    return Machine(tuple(ordered_cores), read_quota(root))


def has_amd_processor(root: Path = Path("/")) -> bool:
    """Return whether this host has a processor of AMD; ``root`` is another one in tests."""
    try:
        return "AuthenticAMD" in (root / "proc/cpuinfo").read_text()
    except OSError:
        return False


def _numa_nodes(root: Path) -> dict[int, int]:
    """Return the NUMA node of each CPU."""
    nodes = {}
    for path in (root / "sys/devices/system/node").glob("node[0-9]*/cpulist"):
        node = int(path.parent.name.removeprefix("node"))
        nodes.update(dict.fromkeys(_numbers(path), node))
    return nodes


def _l3cache(folder: Path) -> int:
    """Return the first CPU that shares the last-level cache of a CPU; -1 if that isn't known."""
    # The numbers of caches differ from their levels: data and instructions may have a cache each.
    for index in (folder / "cache").glob("index[0-9]*"):
        if _number(index / "level") == 3:
            return next(iter(_numbers(index / "shared_cpu_list")), _UNKNOWN)
    return _UNKNOWN


def _number(path: Path) -> int:
    # The files of a CPU that goes offline disappear.
    with contextlib.suppress(OSError, ValueError):
        return int(path.read_text())
    return _UNKNOWN


def _numbers(path: Path) -> list[int]:
    """Return the numbers of a list such as ``0-3,8``; none if there is no such file."""
    with contextlib.suppress(OSError, ValueError):
        return ranks_of(path.read_text().strip())
    return []


# The quota. Kubernetes sets one for a limit of CPUs, and shows all CPUs of the host.


def read_quota(root: Path = Path("/")) -> Quota | None:
    """Return the smallest quota of the control groups of this process; None if there is none."""
    quotas = [quota for folder in groups_of("cpu", root) if (quota := _quota_of(folder))]
    return min(quotas, key=lambda quota: quota.cpus, default=None)


def groups_of(controller: str, root: Path) -> Iterator[Path]:
    """Yield the folders of this process's control groups for a controller such as ``cpu``, and of all above them."""
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            # Version 2 has no controllers in the line, and version 1 a hierarchy for some of them.
            if controllers and controller not in controllers.split(","):
                continue
            mount = root / "sys/fs/cgroup" / controllers
            folder = mount / path.lstrip("/")
            yield folder
            # A container may see its own group as the root, or not see where that is.
            yield from (parent for parent in folder.parents if parent.is_relative_to(mount))


def _quota_of(folder: Path) -> Quota | None:
    with contextlib.suppress(OSError, ValueError):
        if (folder / "cpu.max").exists():
            text, _, period = (folder / "cpu.max").read_text().partition(" ")
        else:
            text = (folder / "cpu.cfs_quota_us").read_text()
            period = (folder / "cpu.cfs_period_us").read_text()
        # The text "max" stands for no quota, and raises a ValueError.
        microseconds = int(text)
        # Version 1 writes -1 if there is no quota.
        if microseconds > 0:
            # Processes that share a group share its time; containers all call their group "/".
            status = folder.stat()
            return Quota(microseconds / int(period), f"{status.st_dev}:{status.st_ino}")
    return None
