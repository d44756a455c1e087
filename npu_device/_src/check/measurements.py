"""What a rank collects by itself (versions, machine, cores, memory, interface), and what the ranks measure together:
who can connect to whom, the time of collectives, and whether a sum is right.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import socket
import statistics
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import tensorflow as tf

from npu_device._src.cluster.rendezvous import installed_versions
from npu_device._src.cluster.time_limits import CONNECT_SECONDS
from npu_device._src.collectives.group import WORLD_GROUP, Group, group_of
from npu_device._src.collectives.job import Job
from npu_device._src.collectives.ops import all_reduce
from npu_device._src.membership.interfaces import interface_of, speed_of
from npu_device._src.trace import clock


@dataclass(frozen=True)
class Facts:
    """The facts of one rank. Serializable as JSON."""

    host: str  # name of its host in the job
    machine: str  # name of its host in the system
    kernel: str  # identifies the running kernel: the same on all ranks of a machine, in whatever container
    address: str  # address at which the others reach it
    interface: str | None  # name of the interface with this address; None if it is no address of this host
    bits: float | None  # bits per second of the interface; None if unknown
    versions: dict[str, str]  # of Python and of what is installed, by name
    cores: list[int]  # numbers of the cores that the process may use
    share: int  # how many of them are for this rank
    quota: float | None  # cores' worth of processor time that the container gets; None without a limit
    free: int  # bytes of memory that are free, on the machine or in the container
    clock: float | None  # seconds by which the clock of the host is ahead of that of rank 0; None if unknown


def collect(job: Job | None) -> Facts:
    """Collect the facts of this rank. Every rank of a job calls this, since the clocks are compared."""
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
    """Yield the directories of the control groups of this process (version 2), innermost first."""
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


SIZES = {4: "4 B", 64 << 10: "64 KiB", 1 << 20: "1 MiB", 16 << 20: "16 MiB"}

_AT_ONCE = 16  # connections
_ELEMENTS = 1 << 18
_SECONDS = 1.0  # for each size, if that is enough for the fewest repeats
_FEWEST, _MOST = 3, 50


def unreachable(job: Job, servers: tuple[str, ...]) -> dict[int, str]:
    """Connect to the server of one rank on each other host, the one with the same place among those of its host."""
    hosts, targets = job.cluster.hosts, []
    for host in dict.fromkeys(hosts) if servers else ():
        ranks = [rank for rank, other in enumerate(hosts) if other == host]
        if host != job.cluster.host:
            targets.append(ranks[min(job.cluster.local_rank, len(ranks) - 1)])
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        outcomes = pool.map(lambda rank: _connect(servers[rank]), targets)
        return {rank: f"{servers[rank]}: {outcome}" for rank, outcome in zip(targets, outcomes) if outcome}


def _connect(server: str) -> str:
    host, _, port = server.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS):
            return ""
    except socket.timeout:
        return "no answer: the connection is dropped on its way"
    except OSError as error:
        return (error.strerror or str(error)).lower()


def sum_is_right(job: Job) -> bool:
    """Return whether a sum over all ranks is what it should be. Every rank calls this."""
    rank, size = job.cluster.rank, job.cluster.world_size
    total = all_reduce(job, tf.fill([_ELEMENTS], float(rank + 1)), "sum", group_of(job, WORLD_GROUP))
    return bool(tf.reduce_all(total == size * (size + 1) / 2))


def within(job: Job) -> list[float] | None:
    """Return the seconds of an all_reduce of the ranks of this host, for each size; None for a single rank."""
    cluster = job.cluster
    ranks = [rank for rank, host in enumerate(cluster.hosts) if host == cluster.host]
    return _by_size(job, "check_within", ranks) if len(ranks) > 1 else None


def between(job: Job, leaders: list[int], engines: Sequence[str]) -> dict[str, list[float]]:
    """Return the seconds of an all_reduce of one rank per host, for each engine and size. The leaders call this."""
    chosen, found = job.hosts, {}
    try:
        for name in engines:
            job.hosts = replace(chosen, engine=name)
            found[name] = _by_size(job, f"check_between_{name}", leaders)
    finally:
        job.hosts = chosen
    return found


def _by_size(job: Job, name: str, ranks: list[int]) -> list[float]:
    group = Group(name, tuple(ranks), ranks.index(job.cluster.rank))
    return [_median_seconds(job, group, size) for size in SIZES]


def _median_seconds(job: Job, group: Group, size: int) -> float:
    """Return the seconds of one of several calls, each of which begins when the one before has ended on all ranks."""
    value = tf.ones([size // 4])

    @tf.function(autograph=False)
    def reduce(tensor: tf.Tensor) -> tf.Tensor:
        return all_reduce(job, tensor, "mean", group)

    called = reduce.get_concrete_function(value)

    def seconds() -> float:
        began = time.perf_counter()
        called(value)
        return time.perf_counter() - began

    seconds()  # the first call makes connections
    slowest = float(all_reduce(job, tf.constant(seconds(), tf.float64), "max", group))  # the same on all ranks
    repeats = min(_MOST, max(_FEWEST, int(_SECONDS / slowest)))
    return statistics.median(seconds() for _ in range(repeats))
