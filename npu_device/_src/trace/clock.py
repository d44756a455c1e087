"""The offset of the clock of a rank from rank 0, measured at the start over the key-value store of the job.

Ranks on the same host read the same clock. On every other host, one rank asks rank 0 for the time, several times; the
quickest answer counts, and its error is at most half its round trip.
"""

from __future__ import annotations

import json
import logging
import time
from dataclasses import asdict, dataclass

from npu_device._src import environment
from npu_device._src.collectives.job import Job

_ROUNDS = 20
_KEY = "trace_clock"

_log = logging.getLogger("npu_device")


@dataclass(frozen=True)
class Offset:
    """The correction of the clock of this rank, and its uncertainty, in microseconds; None when unknown."""

    offset_us: float
    error_us: float | None


def measure(job: Job) -> Offset:
    """Compare clocks. Every rank calls this; rank 0 answers all hosts, one after the other."""
    cluster = job.cluster
    asking = [rank for rank, host in enumerate(cluster.hosts) if host not in cluster.hosts[:rank]][1:]
    try:
        if cluster.rank == 0:
            for rank in asking:
                _answer(job, rank)
        if cluster.hosts[cluster.rank] == cluster.hosts[0]:
            return Offset(0.0, 0.0)
        first = cluster.hosts.index(cluster.hosts[cluster.rank])
        if cluster.rank == first:
            job.store.set(f"{_KEY}/found/{first}", json.dumps(asdict(_ask(job))))
        return Offset(**json.loads(job.store.get(f"{_KEY}/found/{first}", environment.HCCL_CONNECT_TIMEOUT.get())))
    except TimeoutError as error:
        _log.warning(
            "rank %d: the clocks of the hosts could not be compared (%s); times of different hosts don't belong "
            "together in the trace. What to do: turn the trace on for all ranks.",
            cluster.rank,
            error,
        )
        return Offset(0.0, None)


def _answer(job: Job, rank: int) -> None:
    timeout = environment.HCCL_CONNECT_TIMEOUT.get()
    for number in range(_ROUNDS):
        job.store.get(f"{_KEY}/ask/{rank}/{number}", timeout)
        job.store.set(f"{_KEY}/answer/{rank}/{number}", repr(time.time()))


def _ask(job: Job) -> Offset:
    rank, timeout = job.cluster.rank, environment.HCCL_CONNECT_TIMEOUT.get()
    rounds = []
    for number in range(_ROUNDS):
        before = time.time()
        job.store.set(f"{_KEY}/ask/{rank}/{number}", "")
        there = float(job.store.get(f"{_KEY}/answer/{rank}/{number}", timeout))
        after = time.time()
        rounds.append((after - before, there - (before + after) / 2))
    took, offset = min(rounds)
    return Offset(offset * 1e6, took / 2 * 1e6)
