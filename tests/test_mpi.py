"""MPI, whose messages travel between two ranks at a time: a rank that stops, and ranks that no mpiexec started.

The marker ``more_engines`` runs tests of other files on MPI and TCP.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
from pathlib import Path

import job
import pytest
import tensorflow as tf
from mpi_ranks import MpiPool
from pool import Pool
from ranks import all_through

import npu_device as npu
from npu_device._src.collectives.job import current


def body_stopped() -> str:
    """Rank 1 stops until rank 0 has given up waiting for it. (If it is killed, mpiexec kills rank 0, too.)"""
    running, big = current(), tf.ones([1_000_000])
    other = npu.distribute.broadcast_object(os.getpid(), root_rank=1)
    running.stall_watch.warn_after, running.stall_watch.give_up_after = 1.0, 2.0
    if running.cluster.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    try:
        tf.function(lambda: npu.distribute.all_reduce(big, "sum"))()
    except Exception as error:
        return str(error)
    finally:
        if running.cluster.rank == 0:
            os.kill(other, signal.SIGCONT)
    return ""


def assert_a_stopped_rank_is_named(pool: Pool) -> None:
    with contextlib.closing(pool):  # whose job has failed then
        error = pool.run(body_stopped, timeout=60)[0]
    assert re.search(r"rank 1 on host \S+: does not answer", error), error


def test_a_rank_that_stops_is_named(open_mpi_ranks: Pool) -> None:
    assert_a_stopped_rank_is_named(open_mpi_ranks)


@pytest.mark.full
def test_a_rank_of_mpich_that_stops_is_named() -> None:
    assert_a_stopped_rank_is_named(MpiPool(2, "3", **all_through("mpi")))


def test_without_an_mpiexec_every_rank_says_what_to_do(tmp_path: Path) -> None:
    script = "import npu_device as npu\nnpu.open()"
    for result in job.run(tmp_path, 2, script, NPU_DEVICE_BACKEND="mpi"):
        assert result.code == 1
        assert (
            "NPU_DEVICE_BACKEND is mpi, but MPI can't be used:\n  rank 0 on host node0: "
            in result.output
        )
        assert "start all ranks with one mpiexec" in result.output
