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
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import tensorflow as tf

from npu_device._src.check import judge
from npu_device._src.check.judge import SIZES, Facts, Findings
from npu_device._src.cluster.rendezvous import installed_versions
from npu_device._src.cluster.time_limits import CHECK_OTHERS_SECONDS, CONNECT_SECONDS, MEASURED_SECONDS
from npu_device._src.collectives.engine_text import explained, open_ports
from npu_device._src.collectives.group import WORLD_GROUP, Group
from npu_device._src.collectives.job import Job
from npu_device._src.collectives.ops import all_reduce
from npu_device._src.membership.interfaces import interface_of, speed_of
from npu_device._src.trace.trace import measure_clock
from npu_device._src.training.opening import device


def check() -> dict[str, Any]:
    """Open the device of this rank, and check. Every rank calls this; ``leads``: it is the lowest of its host."""
    device.open()
    job = device.running_job()
    found = Findings([_facts(None)]) if job is None else _found(job)
    problems = judge.problems(found)
    report = judge.text(found, problems, judge.warnings(found)) if job is None or job.cluster.rank == 0 else ""
    leads = job is None or job.cluster.local_rank == 0
    return {"works": not problems, "verdict": judge.verdict(problems), "report": report, "leads": leads}


def _found(job: Job) -> Findings:
    cluster = job.cluster

    def gather(name: str, value: Any) -> list[Any]:
        return job.store.gather(f"check/{name}", value, CHECK_OTHERS_SECONDS)

    facts = [Facts(**each) for each in gather("facts", asdict(_facts(job)))]
    leaders = [cluster.hosts.index(host) for host in dict.fromkeys(cluster.hosts)]
    failed = {**_unreachable(job, job.peers.addresses), **_unreachable(job, job.server_addresses)}
    unreachable = [{int(rank): what for rank, what in each.items()} for each in gather("unreachable", failed)]
    found = Findings(facts, explained(job, job.group(WORLD_GROUP)), open_ports(job), job.hosts.problems, unreachable)
    if any(unreachable):  # a collective would wait for the stall watch
        return found
    engines = dict.fromkeys([job.hosts.engine, *(["mpi"] if job.mpi_world else []), "tcp"] if leaders[1:] else [])
    size = cluster.world_size
    total = all_reduce(job, tf.fill([1 << 18], float(cluster.rank + 1)), "sum", job.group(WORLD_GROUP))
    right = bool(tf.reduce_all(total == size * (size + 1) / 2))
    mine = cluster.neighbours
    within = _by_size(job, "check_within", mine) if len(mine) > 1 else None
    gather("within", None)
    between = _between(job, leaders, engines) if cluster.rank in leaders else {}
    measured = gather("speeds", [right, within, between])
    return replace(
        found,
        within=_slowest(within for _, within, _ in measured),
        between={name: _slowest(between.get(name) for *_, between in measured) for name in engines},
        in_use=job.hosts.engine,
        right=all(right for right, *_ in measured),
    )


def _slowest(seconds: Iterable[list[float] | None]) -> list[float]:
    return [max(each) for each in zip(*(one for one in seconds if one is not None))]


def _facts(job: Job | None) -> Facts:
    """Collect the facts of this rank. Every rank of a job calls this, since the clocks are compared."""
    host, address = "node0", "127.0.0.1"  # npurun's names, for a single rank
    ahead: float | None = 0.0
    if job is not None:
        host, address = job.cluster.host, job.cluster.addresses[job.cluster.rank]
        offset, error = measure_clock(job)
        ahead = None if error is None else -offset / 1e6
    interface, cores = interface_of(address), os.sched_getaffinity(0)
    memory = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
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
        free=1024 * int(memory["MemAvailable"].split()[0]),
        clock=ahead,
    )


def _versions() -> dict[str, str]:
    ours = installed_versions()
    found = {"Python": platform.python_version(), "TensorFlow": ours["tensorflow"], "npu_device": ours["npu_device"]}
    for name, distribution in {"Keras": "keras", "tf-keras": "tf-keras", "NumPy": "numpy"}.items():
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(distribution)
    return found


def _unreachable(job: Job, servers: tuple[str, ...]) -> dict[int, str]:
    """Connect to the server of one rank on each other host, the one with the same place among those of its host."""
    hosts, targets = job.cluster.hosts, []
    for host in dict.fromkeys(hosts) if servers else ():
        ranks = [rank for rank, other in enumerate(hosts) if other == host]
        if host != job.cluster.host:
            targets.append(ranks[min(job.cluster.local_rank, len(ranks) - 1)])
    with ThreadPoolExecutor(16) as pool:
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


def _between(job: Job, leaders: list[int], engines: Iterable[str]) -> dict[str, list[float]]:
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
    repeats = min(50, max(3, int(MEASURED_SECONDS / slowest)))
    return statistics.median(seconds() for _ in range(repeats))
