"""``npurun check`` on one rank: what it knows by itself, and what the ranks measure together."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import socket
import statistics
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, astuple, replace
from pathlib import Path
from typing import Any

import tensorflow as tf

from npu_device._src.check import judge
from npu_device._src.check.core_distance import core_distance
from npu_device._src.check.judge import SIZES, CheckedJob, Facts
from npu_device._src.cluster.rendezvous import installed_versions
from npu_device._src.cluster.time_limits import (
    CHECK_OTHERS_SECONDS,
    CONNECT_SECONDS,
    MEASURED_SECONDS,
)
from npu_device._src.collectives.engine_text import explained, open_ports
from npu_device._src.collectives.group import WORLD_GROUP, Group
from npu_device._src.collectives.job import Job
from npu_device._src.collectives.ops import all_reduce
from npu_device._src.machine.free_memory import free_memory, usable_memory
from npu_device._src.machine.topology import read_machine
from npu_device._src.membership.interfaces import interface_of, speed_of
from npu_device._src.trace.trace import measure_clock
from npu_device._src.training.opening import device

# The most cores of a host that are measured, since each pair of cores takes half a second.
_CORES = 9


def check() -> dict[str, Any]:
    """Open the device of this rank, and check. Every rank calls this; ``leads``: it is the lowest of its host."""
    device.open()
    job = device.running_job()
    if job is None:
        checked = CheckedJob([_facts(None)])
    else:
        checked = _measured(job, _connected(job))
    problems = judge.problems(checked)
    report = ""
    if job is None or job.cluster.rank == 0:
        report = judge.text(checked, problems, judge.warnings(checked))
    leads = job is None or job.cluster.local_rank == 0
    return {
        "works": not problems,
        "verdict": judge.verdict(problems),
        "report": report,
        "leads": leads,
    }


def _gather(job: Job, name: str, content: Any) -> list:
    return job.control.gather(f"check/{name}", content, CHECK_OTHERS_SECONDS)


def _connected(job: Job) -> CheckedJob:
    """Return the facts of all ranks, and which of them can't connect."""
    facts_of_ranks = _gather(job, "facts", asdict(_facts(job)))
    facts = [Facts(**fields) for fields in facts_of_ranks]
    failures = _unreachable(job, job.peers.addresses)
    failures |= _unreachable(job, job.server_addresses)
    unreachable = []
    for failures_of_rank in _gather(job, "unreachable", failures):
        # JSON turns keys that are numbers into texts.
        unreachable.append({int(rank): failure for rank, failure in failures_of_rank.items()})
    engine = explained(job, job.group(WORLD_GROUP))
    return CheckedJob(facts, engine, open_ports(job), job.hosts.problems, unreachable)


def _measured(job: Job, checked: CheckedJob) -> CheckedJob:
    """Add what the ranks measure together, if they can connect."""
    # A collective of ranks that can't connect would wait for the stall watch.
    if any(checked.unreachable):
        return checked
    cluster = job.cluster
    leaders = [ranks[0] for ranks in checked.hosts.values()]
    engines = _engines_between(job, len(leaders))
    is_right = _sums_right(job)
    within = None
    if len(cluster.neighbours) > 1:
        within = _by_size(job, "check_within", cluster.neighbours)
    distance = None
    if cluster.local_rank == 0:
        first_core, *cores = checked.cores_of(cluster.host)
        distance = _longest(core_distance(first_core, core) for core in cores[: _CORES - 1])
    # All hosts measure first within, and then between them.
    _gather(job, "within", None)
    between: dict[str, list[float]] = {}
    if cluster.rank in leaders:
        between = _between(job, leaders, engines)
    by_rank = _gather(job, "speeds", [is_right, within, between, distance])
    right_of_all, within_of_all, between_of_all, distances = zip(*by_rank)
    return replace(
        checked,
        within=_slowest(within_of_all),
        between={
            engine: _slowest(times.get(engine) for times in between_of_all) for engine in engines
        },
        engine_in_use=job.hosts.engine,
        distance=_longest(distances),
        is_right=all(right_of_all),
    )


def _engines_between(job: Job, hosts: int) -> list[str]:
    """Return the engines that are compared between hosts: the one in use, and those that can be chosen."""
    if hosts == 1:
        return []
    engines = [job.hosts.engine]
    if job.mpi_world:
        engines.append("mpi")
    engines.append("tcp")
    return list(dict.fromkeys(engines))


def _sums_right(job: Job) -> bool:
    size = job.cluster.world_size
    tensor = tf.fill([1 << 18], float(job.cluster.rank + 1))
    total = all_reduce(job, tensor, "sum", job.group(WORLD_GROUP))
    return bool(tf.reduce_all(total == size * (size + 1) / 2))


def _longest(distances: Iterable[float | None]) -> float | None:
    return max(filter(None, distances), default=None)


def _slowest(times_of_ranks: Iterable[list[float] | None]) -> list[float]:
    """Return the longest time for each size; ranks that haven't measured have none."""
    return list(map(max, zip(*filter(None, times_of_ranks))))


def _facts(job: Job | None, root: Path = Path("/")) -> Facts:
    """Collect the facts of this rank. Every rank of a job calls this, since the clocks are compared."""
    # npurun gives a single rank this name of a host.
    host = "node0"
    address = "127.0.0.1"
    ahead: float | None = 0.0
    machine = read_machine()
    share = len(os.sched_getaffinity(0))
    if job is not None:
        host = job.cluster.host
        address = job.cluster.addresses[job.cluster.rank]
        share = job.cores
        offset, error = measure_clock(job)
        ahead = None
        if error is not None:
            ahead = -offset / 1e6
    interface = interface_of(address)
    bits = None
    if interface:
        bits = speed_of(interface)
    return Facts(
        host=host,
        machine=socket.gethostname(),
        kernel=Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        address=address,
        interface=interface,
        bits=bits,
        versions=_versions(),
        share=share,
        layout=[list(astuple(core)) for core in machine.cores],
        quota=getattr(machine.quota, "cpus", None),
        memory=usable_memory(root),
        free=free_memory(root) or 0,
        clock=ahead,
    )


def _versions() -> dict[str, str]:
    installed = installed_versions()
    versions = {
        "Python": platform.python_version(),
        "TensorFlow": installed["tensorflow"],
        "npu_device": installed["npu_device"],
    }
    for name, distribution in {"Keras": "keras", "tf-keras": "tf-keras", "NumPy": "numpy"}.items():
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(distribution)
    return versions


def _unreachable(job: Job, servers: tuple[str, ...]) -> dict[int, str]:
    """Connect to the server of one rank on each other host, the one with the same place among those of its host."""
    if not servers:
        return {}
    targets = []
    for host, ranks in judge.ranks_by(job.cluster.hosts).items():
        if host != job.cluster.host:
            targets.append(ranks[min(job.cluster.local_rank, len(ranks) - 1)])
    targets.sort()
    # All at once, since a firewall that drops packets makes each connection wait.
    with ThreadPoolExecutor(16) as pool:
        outcomes = list(pool.map(_connect, [servers[rank] for rank in targets]))
    failures = {}
    for rank, outcome in zip(targets, outcomes):
        if outcome:
            failures[rank] = f"{servers[rank]}: {outcome}"
    return failures


def _connect(server: str) -> str:
    host, _, port = server.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS):
            return ""
    except socket.timeout:
        return "no answer: the connection is dropped on its way"
    except OSError as error:
        return (error.strerror or str(error)).lower()


def _between(job: Job, leaders: list[int], engines: Iterable[str]) -> dict[str, list[float]]:
    """Return the seconds of an all_reduce of one rank per host, for each engine and size. The leaders call this."""
    hosts = job.hosts
    times = {}
    # The job has chosen one engine, and each of the others is tried in its place.
    try:
        for engine in engines:
            job.hosts = replace(hosts, engine=engine)
            times[engine] = _by_size(job, f"check_between_{engine}", leaders)
    finally:
        job.hosts = hosts
    return times


def _by_size(job: Job, name: str, ranks: list[int]) -> list[float]:
    group = Group(name, tuple(ranks), ranks.index(job.cluster.rank))
    return [_median_seconds(job, group, size) for size in SIZES]


def _median_seconds(job: Job, group: Group, size: int) -> float:
    """Return the seconds of one of several calls, each of which begins when the one before has ended on all ranks."""
    tensor = tf.ones([size // 4])

    @tf.function(autograph=False)
    def reduce(tensor: tf.Tensor) -> tf.Tensor:
        return all_reduce(job, tensor, "mean", group)

    concrete = reduce.get_concrete_function(tensor)

    def seconds() -> float:
        began = time.perf_counter()
        concrete(tensor)
        return time.perf_counter() - began

    # The first call makes connections, and isn't timed.
    seconds()
    # The slowest rank decides, so that all ranks make the same number of calls.
    first_time = tf.constant(seconds(), tf.float64)
    slowest = float(all_reduce(job, first_time, "max", group))
    repeats = min(50, max(3, int(MEASURED_SECONDS / slowest)))
    return statistics.median(seconds() for _ in range(repeats))
