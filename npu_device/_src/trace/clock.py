"""The offset of the clock of a rank from rank 0. Ranks on one host read the same clock. The first rank of each other
host asks rank 0 for the time, several times. The quickest answer counts. Its error is at most half its round trip.
"""

from __future__ import annotations

import logging
import time
from typing import NamedTuple, Optional

from npu_device._src import environment
from npu_device._src.cluster.errors import ClusterError
from npu_device._src.collectives.job import Job

_ROUNDS = 20

_log = logging.getLogger("npu_device")


class Offset(NamedTuple):
    """The correction of the clock of this rank, and its uncertainty, in microseconds; None when unknown."""

    offset_us: float
    error_us: Optional[float]


def measure(job: Job) -> Offset:
    """Compare clocks, and return the offset, the same on all ranks of a host. Every rank calls this."""
    cluster, timeout = job.cluster, environment.HCCL_CONNECT_TIMEOUT.get()
    neighbours = [rank for rank, host in enumerate(cluster.hosts) if host == cluster.host]
    first = neighbours[0]
    if first == 0:
        return Offset(0.0, 0.0)
    try:
        mine = min(_ask(job, number, timeout) for number in range(_ROUNDS)) if cluster.rank == first else None
        found = job.store.gather_from(f"clock of {cluster.host}", mine, neighbours, timeout).get(first)
        if found is None:
            raise TimeoutError(f"rank {first} hasn't compared them")
    except (ClusterError, TimeoutError) as error:
        _log.warning(
            "rank %d: the clocks of the hosts could not be compared (%s); times of different hosts don't belong "
            "together in the trace. What to do: turn the trace on for all ranks.",
            cluster.rank,
            error,
        )
        return Offset(0.0, None)
    took, offset = found
    return Offset(offset * 1e6, took / 2 * 1e6)


def _ask(job: Job, number: int, timeout: float) -> tuple[float, float]:
    before = time.time()
    there = job.health.ask("clock", [job.cluster.rank, number], [0], timeout).get(0)
    after = time.time()
    if there is None:
        raise TimeoutError("rank 0 doesn't answer")
    return after - before, there - (before + after) / 2
