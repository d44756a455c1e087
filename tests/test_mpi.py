"""MPI as an engine: Open MPI's ranks, and a rank that stops. ``test_point_to_point`` has those of MPICH."""

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
import test_collectives
import test_segments
import test_send_receive
from mpi_ranks import MpiPool, mpiexec, run_under
from pool import Pool
from ranks import DEAD_PROXY, all_through

from benchmarks import mpiexecs

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
    limits = {"NPU_DEVICE_STALL_WARNING": "2", "NPU_DEVICE_STALL_TIMEOUT": "4", **all_through("mpi"), **DEAD_PROXY}
    result = run_under([*mpiexec(kind), "-n", "2", sys.executable, launcher.script(tmp_path, STOPPING)], **limits)
    assert result.returncode != 0
    assert re.search(r"rank 1 on host \S+: does not answer", result.stdout), result.stdout


def test_without_an_mpiexec_every_rank_says_what_to_do(tmp_path: Path) -> None:
    for result in job.run(tmp_path, 2, "import npu_device as npu\nnpu.open()", NPU_DEVICE_BACKEND="mpi"):
        assert result.code == 1
        assert "NPU_DEVICE_BACKEND is mpi, but MPI can't be used:\n  rank 0 on host node0: " in result.output
        assert "start all ranks with one mpiexec" in result.output
