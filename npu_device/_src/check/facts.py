"""The facts that one rank can collect by itself: versions, machine, cores, memory, interface."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from npu_device._src.cluster.rendezvous import installed_versions
from npu_device._src.collectives.job import Job
from npu_device._src.membership.interfaces import interface_of, speed_of
from npu_device._src.trace import clock


@dataclass(frozen=True)
class Facts:
    """One rank's own facts. Serializable as JSON.

    Attributes:
        host: name of its host in the job.
        machine: name of its host in the system.
        kernel: identifies the running kernel: the same on all ranks of a machine, in whatever container.
        address: address at which the others reach it.
        interface: name of the interface with this address; None if it is no address of this host.
        bits: the interface's bits per second; None if unknown.
        versions: of Python and of what is installed, by name.
        cores: numbers of the cores that the process may use.
        share: how many of them are for this rank.
        quota: cores' worth of processor time that the container gets; None without a limit.
        free: bytes of memory that are free, on the machine or in the container.
        clock: seconds by which the host's clock is ahead of rank 0's; None if unknown.
    """

    host: str
    machine: str
    kernel: str
    address: str
    interface: str | None
    bits: float | None
    versions: dict[str, str]
    cores: list[int]
    share: int
    quota: float | None
    free: int
    clock: float | None


def collect(job: Job | None) -> Facts:
    """Collect this rank's facts. Every rank of a job calls this, since the clocks are compared."""
    host, address = "node0", "127.0.0.1"  # npurun's names, for a single rank
    ahead: float | None = 0.0
    if job is not None:
        host, address = job.cluster.host, job.cluster.addresses[job.cluster.rank]
        measured = clock.measure(job)
        ahead = None if measured.error_us is None else -measured.offset_us / 1e6
    interface, cores = interface_of(address), os.sched_getaffinity(0)
    return Facts(
        host=host,
        machine=socket.gethostname(),
        kernel=Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        address=address,
        interface=interface,
        bits=speed_of(interface) if interface else None,
        versions=_versions(),
        cores=sorted(cores),
        share=len(cores) if job is None else job.cores,
        quota=_quota(),
        free=_free_memory(),
        clock=ahead,
    )


def _versions() -> dict[str, str]:
    ours = installed_versions()
    found = {"Python": platform.python_version(), "TensorFlow": ours["tensorflow"], "npu_device": ours["npu_device"]}
    for name, distribution in {"Keras": "keras", "tf-keras": "tf-keras", "NumPy": "numpy"}.items():
        try:
            found[name] = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _control_groups() -> Iterator[Path]:
    """Yield the directories of this process's control groups (version 2), innermost first."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        if line.startswith("0::/"):
            root = Path("/sys/fs/cgroup")
            inner = root / line[len("0::/") :]
            yield from (each for each in (inner, *inner.parents) if each.is_relative_to(root))


def _quota() -> float | None:
    quotas = []
    for group in _control_groups():
        try:
            quota, period = (group / "cpu.max").read_text().split()
            quotas.append(int(quota) / int(period))
        except (OSError, ValueError):  # the root has none; "max" is no limit
            continue
    return min(quotas, default=None)


def _free_memory() -> int:
    meminfo = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    free = [1024 * int(meminfo["MemAvailable"].split()[0])]
    for group in _control_groups():
        try:
            most, used = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
            cached = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())["inactive_file"]
        except (OSError, ValueError, KeyError):
            continue
        free.append(most - used + int(cached))
    return min(free)
