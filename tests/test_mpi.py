"""MPI as an engine: Open MPI's ranks, and a rank that stops. ``test_point_to_point`` has those of MPICH."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import job
import pytest
import tensorflow as tf
import test_agreement
import test_all_reduce
import test_collectives
import test_send_receive
from mpi_ranks import MpiPool
from pool import Pool

import npu_device as npu
from npu_device._src.collectives.job import current

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("mpi4py") is None, reason="needs mpi4py"),
    pytest.mark.xdist_group("mpi"),
]


@pytest.fixture(scope="module")
def other_ranks() -> Iterator[Pool]:
    """Two ranks of Open MPI, for less: what differs between the two is in the library."""
    pool = MpiPool(2, "Open MPI")
    yield pool
    pool.close()


@pytest.mark.slow
def test_open_mpi(other_ranks: Pool) -> None:
    test_collectives.test_moves(other_ranks, "world", "eager", test_collectives.FEW_DTYPES[::2])
    test_collectives.test_reductions(other_ranks, "world", "eager", test_collectives.FEW_DTYPES[::2])
    test_collectives.test_in_a_loop(other_ranks)
    test_send_receive.test_tags_are_not_mixed_up(other_ranks)
    test_all_reduce.test_compression_of_indexed_slices(other_ranks, 1000)
    test_agreement.test_calls_that_do_not_match(other_ranks, "dtype")


def body_stopped() -> str:
    """Rank 1 stops until rank 0 has given up waiting for it. (If it is killed, mpiexec kills rank 0, too.)"""
    running, big = current(), tf.ones([1_000_000])
    other = npu.distribute.broadcast_object(os.getpid(), root_rank=1)
    running.stall_watch._warn_after, running.stall_watch._give_up_after = 1.0, 2.0
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
    """Assert it; it ends the job of the pool."""
    error = pool.run(body_stopped, timeout=60)[0]
    assert re.search(r"rank 1 on host \S+: does not answer", error), error


@pytest.mark.slow
def test_a_rank_that_stops_is_named(other_ranks: Pool) -> None:
    assert_a_stopped_rank_is_named(other_ranks)


def test_without_an_mpiexec_every_rank_says_what_to_do(tmp_path: Path) -> None:
    for result in job.run(tmp_path, 2, "import npu_device as npu\nnpu.open()", NPU_DEVICE_BACKEND="mpi"):
        assert result.code == 1
        assert "NPU_DEVICE_BACKEND is mpi, but MPI can't be used:\n  rank 0 on host node0: " in result.output
        assert "start all ranks with one mpiexec" in result.output
