"""MPI as an engine: all kinds of calls under MPICH's and Open MPI's mpiexec, and a rank that stops."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import job
import launcher
import pytest
import test_agreement
import test_all_reduce
import test_collective_numbers
import test_collective_sizes
import test_collectives
import test_groups
import test_segments
import test_send_receive
import test_sessions_collectives
from mpi_ranks import MpiPool, mpiexec, run_under
from pool import Pool

from benchmarks import mpiexecs

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("mpi4py") is None, reason="needs mpi4py"),
    pytest.mark.xdist_group("mpi"),
]


@pytest.fixture(scope="module")
def mpi_ranks() -> Iterator[Pool]:
    """Three ranks of MPICH."""
    pool = MpiPool(3, "MPICH")
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def other_ranks() -> Iterator[Pool]:
    """Two ranks of Open MPI, for less: what differs between the two is in the library."""
    pool = MpiPool(2, "Open MPI")
    yield pool
    pool.close()


@pytest.mark.slow
def test_moves(mpi_ranks: Pool) -> None:
    test_collectives.test_moves(mpi_ranks, "mpi", "world", "eager", test_collectives.EVERY_DTYPE)
    test_collectives.test_moved_bits_stay_as_they_are(mpi_ranks)
    test_collectives.test_in_a_loop(mpi_ranks)
    test_collectives.test_barrier(mpi_ranks)


@pytest.mark.slow
def test_reductions(mpi_ranks: Pool) -> None:
    test_collectives.test_reductions(mpi_ranks, "mpi", "world", "eager", test_collectives.EVERY_DTYPE)
    test_collectives.test_reductions(mpi_ranks, "mpi", "sub", "graph", test_collectives.FEW_DTYPES)
    test_all_reduce.test_every_rank_gets_the_same_bits(mpi_ranks)
    test_collective_numbers.test_no_sum_is_infinite_that_has_a_number(mpi_ranks)
    test_collective_numbers.test_the_mean_of_equal_values_is_that_value(mpi_ranks)
    test_collective_numbers.test_reduce_scatter_gives_the_bits_of_all_reduce(mpi_ranks, "mpi")


@pytest.mark.slow
def test_sizes(mpi_ranks: Pool) -> None:
    test_collective_sizes.test_without_elements(mpi_ranks, "eager")
    test_collective_sizes.test_unknown_static_shapes(mpi_ranks)
    test_collective_sizes.test_one_byte_and_scalars(mpi_ranks)


@pytest.mark.slow
def test_transfers(mpi_ranks: Pool) -> None:
    test_send_receive.test_everybody_sends_first_in_a_graph(mpi_ranks)
    test_send_receive.test_tags_are_not_mixed_up(mpi_ranks)
    test_send_receive.test_refusals(mpi_ranks)


@pytest.mark.slow
def test_gradients(mpi_ranks: Pool) -> None:
    test_segments.test_the_strategy_cuts_the_list(mpi_ranks)
    test_segments.test_results_come_back_in_the_callers_order(mpi_ranks, False)
    test_segments.test_compression_of_the_wire(mpi_ranks, "fp16")
    test_segments.test_sparse_gradients_both_ways(mpi_ranks, 5, "mean")


def test_groups_come_and_go(mpi_ranks: Pool) -> None:
    test_groups.test_overlapping_groups_and_groups_of_one(mpi_ranks)
    test_groups.test_destroyed_and_made_again(mpi_ranks)


@pytest.mark.slow
def test_sessions(mpi_ranks: Pool) -> None:
    test_sessions_collectives.test_operators(mpi_ranks)
    test_sessions_collectives.test_opposite_orders_with_one_thread(mpi_ranks)
    test_sessions_collectives.test_a_mismatch_is_an_error_of_run_and_the_session_goes_on(mpi_ranks)


def test_calls_that_do_not_match(mpi_ranks: Pool) -> None:
    for case in ("dtype", "operation", "dense against sparse"):
        test_agreement.test_calls_that_do_not_match(mpi_ranks, case)


@pytest.mark.slow
def test_open_mpi(other_ranks: Pool) -> None:
    test_collectives.test_moves(other_ranks, "mpi", "world", "eager", test_collectives.EVERY_DTYPE)
    test_collectives.test_reductions(other_ranks, "mpi", "world", "eager", test_collectives.EVERY_DTYPE)
    test_collectives.test_in_a_loop(other_ranks)
    test_send_receive.test_tags_are_not_mixed_up(other_ranks)
    test_segments.test_compression_of_the_wire(other_ranks, "bf16")
    test_agreement.test_calls_that_do_not_match(other_ranks, "dtype")


# Rank 1 stops while rank 0 waits for it. (If it is killed, mpiexec kills rank 0 too, which may be too early to print.)
STOPPING = """
import os, signal
import tensorflow as tf
import npu_device as npu
rank = npu.open().worker_id
big = tf.ones([1_000_000])
npu.distribute.all_reduce(big, "sum")
if rank == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
tf.function(lambda: npu.distribute.all_reduce(big, "sum"))()
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", mpiexecs.KINDS)
def test_a_rank_that_stops_is_named_and_ends_the_job(kind: str, tmp_path: Path) -> None:
    limits = {"NPU_DEVICE_STALL_WARNING": "2", "NPU_DEVICE_STALL_TIMEOUT": "4", "NPU_DEVICE_BACKEND": "mpi"}
    result = run_under([*mpiexec(kind), "-n", "2", sys.executable, launcher.script(tmp_path, STOPPING)], **limits)
    assert result.returncode != 0
    assert re.search(r"rank 1 on host \S+: does not answer", result.stdout), result.stdout


def test_without_an_mpiexec_every_rank_says_what_to_do(tmp_path: Path) -> None:
    for result in job.run(tmp_path, 2, "import npu_device as npu\nnpu.open()", NPU_DEVICE_BACKEND="mpi"):
        assert result.code == 1
        assert "NPU_DEVICE_BACKEND is mpi, but MPI can't be used:\n  rank 0 on host here: " in result.output
        assert "start all ranks with one mpiexec" in result.output
