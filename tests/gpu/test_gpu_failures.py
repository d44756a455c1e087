"""Mismatches, killed and stopped ranks: the others raise in seconds, wherever their tensors are."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import job
import pytest

from gpu.conftest import Way

BEGIN = """
import os, signal, time
if "NCCL_HOSTID" in os.environ:
    os.environ["NCCL_HOSTID"] = os.environ["RANK_ID"]
import tensorflow as tf
import npu_device as npu
handle = npu.open().as_default()
rank = handle.worker_id
with handle.scope():
    value = tf.Variable(tf.ones([300_000]))
@tf.function
def step(value):
    return npu.distribute.all_reduce([value, 2 * value], "mean")
print("sum", float(step(value)[0][0]), flush=True)
"""


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "function"])
def test_calls_that_differ(way: Way, tmp_path: Path, graph: bool) -> None:
    """The ranks compare their calls before NCCL gets anything, or it would wait forever or add up other tensors."""
    call = "step(other)" if graph else 'npu.distribute.all_reduce(other, "sum")'
    script = BEGIN + f"other = tf.ones([4 + rank])\nprint(npu.distribute.all_reduce(tf.constant(1)))\n{call}\n"
    for result in job.run(tmp_path, 2, script, timeout=60, **way.environment(tmp_path)):
        assert result.code == 1
        assert "different collective operations" in result.output
        assert "float32 [4]" in result.output and "float32 [5]" in result.output


def test_a_killed_rank(way: Way, tmp_path: Path) -> None:
    script = (
        BEGIN
        + """
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
began = time.time()
try:
    for _ in range(100_000):
        step(value)
finally:
    print("seconds", time.time() - began, flush=True)
"""
    )
    found, killed = job.run(tmp_path, 2, script, timeout=60, **way.environment(tmp_path))
    assert killed.code == -signal.SIGKILL
    assert found.code == 1
    assert "rank 1 on host" in found.output or "task:1" in found.output
    assert float(found.output.rsplit("seconds ", 1)[1].split()[0]) < 15


def test_a_stopped_rank(way: Way, tmp_path: Path) -> None:
    script = (
        BEGIN
        + """
try:
    for number in range(1000):
        step(value)
        if (rank, number) == (1, 20):
            os.kill(os.getpid(), signal.SIGSTOP)
except Exception as error:
    print(error, flush=True)
    os._exit(3)  # rank 0 would wait a while for the one that is stopped
"""
    )
    environment = {**way.environment(tmp_path), "NPU_DEVICE_STALL_WARNING": "1", "NPU_DEVICE_STALL_TIMEOUT": "4"}
    ranks = job.start(tmp_path, 2, script, **environment)
    try:
        code = ranks[0].wait(60)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert code == 3, ranks[0].output
    assert re.search(r"rank 1 on host \S+: does not answer: stopped", ranks[0].output)
