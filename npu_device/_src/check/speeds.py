"""The time of real collectives by size, within the hosts and between them, and whether a sum is right."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import replace

import tensorflow as tf

from npu_device._src.collectives.group import WORLD_GROUP, Group, group_of
from npu_device._src.collectives.job import Job
from npu_device._src.collectives.ops import all_reduce

SIZES = (4, 64 << 10, 1 << 20, 16 << 20)
"""Bytes."""

_ELEMENTS = 1 << 18
_WITHIN, _BETWEEN = "check_within", "check_between"
_SECONDS = 1.0  # for each size, if that is enough for the fewest repeats
_FEWEST, _MOST = 3, 50


def sum_is_right(job: Job) -> bool:
    """Return whether a sum over all ranks is what it should be. Every rank calls this."""
    rank, size = job.cluster.rank, job.cluster.world_size
    total = all_reduce(job, tf.fill([_ELEMENTS], float(rank + 1)), "sum", group_of(job, WORLD_GROUP))
    return bool(tf.reduce_all(total == size * (size + 1) / 2))


def within(job: Job) -> list[float] | None:
    """Return the seconds of an all_reduce of the ranks of this host, for each size; None for a single rank."""
    cluster = job.cluster
    ranks = [rank for rank, host in enumerate(cluster.hosts) if host == cluster.host]
    return _by_size(job, _WITHIN, ranks) if len(ranks) > 1 else None


def between(job: Job, leaders: list[int], engines: Sequence[str]) -> dict[str, list[float]]:
    """Return the seconds of an all_reduce of one rank per host, for each engine and size. The leaders call this."""
    chosen, found = job.hosts, {}
    try:
        for name in engines:
            job.hosts = replace(chosen, engine=name)
            found[name] = _by_size(job, f"{_BETWEEN}_{name}", leaders)
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
