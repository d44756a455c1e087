"""What the ranks measure together: who can connect to whom, the time of collectives, and whether a sum is right."""

from __future__ import annotations

import socket
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import tensorflow as tf

from npu_device._src.collectives.group import WORLD_GROUP, Group, group_of
from npu_device._src.collectives.job import Job
from npu_device._src.collectives.ops import all_reduce

SIZES = {4: "4 B", 64 << 10: "64 KiB", 1 << 20: "1 MiB", 16 << 20: "16 MiB"}

_CONNECT_SECONDS = 3.0
_AT_ONCE = 16  # connections
_ELEMENTS = 1 << 18
_SECONDS = 1.0  # for each size, if that is enough for the fewest repeats
_FEWEST, _MOST = 3, 50


def unreachable(job: Job, servers: tuple[str, ...]) -> dict[int, str]:
    """Connect to the server of one rank on each other host, the one with this rank's place among those of its host.

    Args:
        job: the job.
        servers: each rank's ``host:port``.

    Returns:
        Where and what happened, by rank, for those that can't be reached.
    """
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
        with socket.create_connection((host.strip("[]"), int(port)), _CONNECT_SECONDS):
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
