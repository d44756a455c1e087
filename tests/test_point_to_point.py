"""The engines whose messages travel between two ranks at a time, MPI and TCP: all kinds of calls on three ranks; Open
MPI's ranks; and a rank that stops.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Callable, Optional

import job
import pytest
import tensorflow as tf
import test_agreement
import test_all_reduce
import test_collective_numbers
import test_collectives
import test_groups
import test_segments
import test_sessions_collectives
from mpi_ranks import MpiPool
from pool import Pool
from ranks import all_through

import npu_device as npu
from npu_device._src.collectives.job import current

pytestmark = pytest.mark.xdist_group("point to point")

_NEEDS_MPI4PY = pytest.mark.skipif(
    importlib.util.find_spec("mpi4py") is None, reason="needs mpi4py"
)


@pytest.fixture(scope="module", params=["tcp", pytest.param("mpi", marks=_NEEDS_MPI4PY)])
def moves(request: pytest.FixtureRequest) -> str:
    """The backend."""
    return str(request.param)


@pytest.fixture(scope="module")
def mpi_ranks(moves: str) -> Iterator[Optional[Pool]]:
    """Three ranks of MPICH, where the backend is MPI."""
    with (
        contextlib.closing(MpiPool(3, "MPICH"))
        if moves == "mpi"
        else contextlib.nullcontext() as pool
    ):
        yield pool


@pytest.fixture
def three(moves: str, mpi_ranks: Optional[Pool], pool_with: Callable[..., Pool]) -> Pool:
    """Three ranks on the backend."""
    return mpi_ranks or pool_with(3, "3", **all_through(moves))


def assert_numbers(pool: Pool, dtypes: tuple[str, ...]) -> None:
    for wrong, *_ in pool.run(
        test_collective_numbers.body_operations, False, test_collective_numbers.SLOT, dtypes
    ):
        assert wrong == []


@pytest.mark.slow
def test_operations(three: Pool, moves: str) -> None:
    test_collectives.test_moves(three, "world", "eager", test_collectives.FEW_DTYPES)
    test_collectives.test_in_a_loop(three)
    test_collectives.test_barrier(three)
    test_collectives.test_everybody_sends_first_in_a_graph(three)
    test_collectives.test_tags_are_not_mixed_up(three)
    assert_numbers(three, ("float16", "float32", "int8", "uint32"))
    test_collective_numbers.test_no_sum_is_infinite_that_has_a_number(three)
    test_collective_numbers.test_the_mean_of_equal_values_is_that_value(three)
    test_collective_numbers.test_reduce_scatter_gives_the_bits_of_all_reduce(three, moves)
    test_collective_numbers.test_without_elements(three, "eager")


@pytest.mark.slow
def test_gradients(three: Pool) -> None:
    test_segments.test_the_strategy_cuts_the_list(three)
    test_segments.test_results_come_back_in_the_callers_order(three, False)
    test_all_reduce.test_compression_of_indexed_slices(three, 1000)


def test_groups_come_and_go(three: Pool) -> None:
    test_groups.test_overlapping_groups_and_groups_of_one(three)
    test_groups.test_destroyed_and_made_again(three)
    test_groups.test_destroyed_while_the_sender_sleeps(three)


def test_sessions_and_calls_that_do_not_match(three: Pool) -> None:
    test_sessions_collectives.test_opposite_orders_with_one_thread(three)
    test_sessions_collectives.test_a_mismatch_is_an_error_of_run_and_the_session_goes_on(three)
    test_agreement.test_calls_that_do_not_match(three, "dtype")
    test_agreement.test_calls_that_do_not_match(three, "dense against sparse")


@_NEEDS_MPI4PY
def test_open_mpi() -> None:
    """Two ranks, for less: what differs from MPICH is in the library."""
    with contextlib.closing(MpiPool(2, "Open MPI")) as pool:
        test_collectives.test_moves(pool, "world", "eager", ("bfloat16",))
        test_collectives.test_tags_are_not_mixed_up(pool)
        assert_numbers(pool, ("float32",))
        test_agreement.test_calls_that_do_not_match(pool, "dtype")
        assert_a_stopped_rank_is_named(pool)


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


def test_a_rank_that_stops_is_named(three: Pool, moves: str) -> None:
    """The last one, whose ranks end; not marked as slow, since those come first."""
    if moves == "tcp":
        pytest.skip("test_failures.py has it")
    assert_a_stopped_rank_is_named(three)


def test_without_an_mpiexec_every_rank_says_what_to_do(tmp_path: Path) -> None:
    for result in job.run(
        tmp_path, 2, "import npu_device as npu\nnpu.open()", NPU_DEVICE_BACKEND="mpi"
    ):
        assert result.code == 1
        assert (
            "NPU_DEVICE_BACKEND is mpi, but MPI can't be used:\n  rank 0 on host node0: "
            in result.output
        )
        assert "start all ranks with one mpiexec" in result.output
