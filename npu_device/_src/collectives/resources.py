"""Limit this rank to its share of the host's cores. Applied before TensorFlow makes its devices."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction

import tensorflow as tf

from npu_device._src import compat, environment
from npu_device._src.cluster.time_limits import LATEST_ANSWER_SECONDS
from npu_device._src.collectives.job import Job

_log = logging.getLogger("npu_device")

LEAST_INTER_OP_THREADS = 2
"""A single thread runs first what became ready last: in a backward pass it delays every other gradient to the end, and
nothing can be sent meanwhile. A second one takes what became ready first. It is also needed if one is busy in the
input pipeline while the other runs the step.
"""


def count_cores(running: Job) -> None:
    """Set ``running.cores`` and ``running.has_own_core``, together with the other ranks of the host.

    The launcher may have bound each rank to cores of its own (Open MPI and Slurm do), so the ranks compare theirs.

    Raises:
        ClusterError: the hub is gone.
    """
    cluster, mine = running.cluster, sorted(os.sched_getaffinity(0))
    neighbours = [rank for rank, host in enumerate(cluster.hosts) if host == cluster.host]
    found = running.store.gather_from(f"cores/{neighbours[0]}", mine, neighbours, LATEST_ANSWER_SECONDS)
    share = share_of_cores(mine, list(found.values()))
    running.cores, running.has_own_core = max(1, int(share)), share >= 1


def share_of_cores(mine: Sequence[int], ranks: Sequence[Sequence[int]]) -> Fraction:
    """Return a rank's share of the cores that it may use.

    Args:
        mine: numbers of the cores that it may use.
        ranks: the same for each rank of the host, including itself.

    Examples:
        >>> print(share_of_cores(range(8), [range(8)] * 3), share_of_cores(range(8), [range(8), range(8, 16)]))
        8/3 8
    """
    users = Counter(core for cores in ranks for core in cores)
    return sum((Fraction(1, users[core]) for core in mine), Fraction())


def divide_cores(running: Job) -> None:
    """Give each rank of a host its share of the cores, unless the user has set the number of threads.

    TensorFlow starts a thread pool as wide as the machine in every process; several of them on a host compete for the
    cores. If TensorFlow has already been used, it has already started them.
    """
    if environment.user_sets_threads():
        return
    if compat.context_is_initialized():
        _log.info(
            "rank %d: TensorFlow was used before npu.open(), and its threads are not divided among the ranks of the "
            "host; training is faster with npu.open() right after the imports",
            running.cluster.rank,
        )
        return
    threading = tf.config.threading
    share = running.cores
    if running.cluster.local_size > 1 and threading.get_intra_op_parallelism_threads() == 0:
        threading.set_intra_op_parallelism_threads(share)
    if threading.get_inter_op_parallelism_threads() == 0:
        threads = max(LEAST_INTER_OP_THREADS, share)
        threading.set_inter_op_parallelism_threads(threads)
        if threads > share:  # they would take the core from each other (docs/notes.md)
            compat.let_idle_threads_sleep()
