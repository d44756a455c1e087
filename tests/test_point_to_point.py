"""The backends whose messages travel between two ranks at a time, MPI and TCP: all kinds of calls on three ranks."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Callable, Optional

import pytest
import test_agreement
import test_all_reduce
import test_collective_numbers
import test_collective_sizes
import test_collectives
import test_groups
import test_mpi
import test_segments
import test_send_receive
import test_sessions_collectives
from mpi_ranks import MpiPool
from pool import Pool
from ranks import all_through

pytestmark = pytest.mark.xdist_group("point to point")

_NEEDS_MPI4PY = pytest.mark.skipif(importlib.util.find_spec("mpi4py") is None, reason="needs mpi4py")


@pytest.fixture(scope="module", params=["tcp", pytest.param("mpi", marks=_NEEDS_MPI4PY)])
def moves(request: pytest.FixtureRequest) -> str:
    """The backend."""
    return str(request.param)


@pytest.fixture(scope="module")
def mpi_ranks(moves: str) -> Iterator[Optional[Pool]]:
    """Three ranks of MPICH, where the backend is MPI."""
    pool = MpiPool(3, "MPICH") if moves == "mpi" else None
    yield pool
    if pool is not None:
        pool.close()


@pytest.fixture
def three(moves: str, mpi_ranks: Optional[Pool], pool_with: Callable[..., Pool]) -> Pool:
    """Three ranks on the backend."""
    return mpi_ranks or pool_with(3, "3", **all_through(moves))


@pytest.mark.slow
def test_operations(three: Pool, moves: str) -> None:
    test_collectives.test_moves(three, "world", "eager", test_collectives.FEW_DTYPES[::2])
    test_collectives.test_moved_bits_stay_as_they_are(three)
    test_collectives.test_in_a_loop(three)
    test_collectives.test_barrier(three)
    test_collectives.test_reductions(three, "world", "eager", test_collectives.EVERY_DTYPE)
    test_collective_numbers.test_no_sum_is_infinite_that_has_a_number(three)
    test_collective_numbers.test_the_mean_of_equal_values_is_that_value(three)
    test_collective_numbers.test_reduce_scatter_gives_the_bits_of_all_reduce(three, moves)
    test_collective_sizes.test_without_elements(three, "eager")


@pytest.mark.slow
def test_transfers(three: Pool) -> None:
    test_send_receive.test_everybody_sends_first_in_a_graph(three)
    test_send_receive.test_tags_are_not_mixed_up(three)


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


def test_a_rank_that_stops_is_named(three: Pool, moves: str) -> None:
    """The last one, whose ranks end; not marked as slow, since those come first."""
    if moves == "tcp":
        pytest.skip("test_failures.py has it")
    test_mpi.assert_a_stopped_rank_is_named(three)
