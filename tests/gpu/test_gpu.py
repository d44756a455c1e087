"""Tests on GPUs: placement, numbers, overlap, XLA, memory, and ranks that fail, wherever their tensors are."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from pathlib import Path

import job
import numpy as np
import pytest
from pool import Pool
from test_horovod import PINNING
from test_xla import REMEDY, body_compiled_functions, body_fit

from gpu import bodies
from gpu.conftest import NCCL, Way
from npu_device._src.trace.records import read


def test_each_rank_has_its_device(way: Way) -> None:
    found = way.pool(2, "3").run(bodies.devices)
    assert found[0]["reduced"] == found[1]["reduced"]
    for one in found:
        assert ("GPU" if way.on_gpu else "CPU") in one["scope"]
        assert one["visible"] == one["logical"] == (1 if way.on_gpu else 0)
        assert one["names"] == found[0]["names"]
        assert one["in sessions"] == ",".join(one["numbers"])
    if not way.on_gpu:
        assert found[0]["no nccl"] == "no rank has a GPU"
    elif way.name == NCCL:
        assert [one["no nccl"] for one in found] == ["", ""]
        assert (found[0]["unit"] == found[1]["unit"]) == way.apart
    else:
        assert "share a GPU" in found[0]["no nccl"]
        assert found[0]["unit"] == found[1]["unit"]
        assert [one["grows"] for one in found] == [[True], [True]]


def test_every_dtype_goes_its_way(way: Way) -> None:
    """One list has floating-point tensors on the GPU and the CPU, integers, and rows; all ranks go in one order."""
    expected = bodies.expected_numbers(2)
    for found in way.pool(2, "3").run(bodies.numbers):
        for mode, results in found.items():
            assert len(results) == len(expected)
            for place, (result, right) in enumerate(zip(results, expected)):
                np.testing.assert_allclose(
                    result, right, rtol=1e-2, err_msg=f"{mode}, result {place}"
                )


@pytest.mark.parametrize("keras", ["2", "3"], ids=["keras2", "keras3"])
def test_custom_loops(way: Way, on_cpu: Callable[[str], Pool], keras: str) -> None:
    [right] = on_cpu(keras).run(bodies.loop, 6, 1, True)
    for segments, compiled in ((1, True), (4, True), (1, False)):
        for found in way.pool(2, keras).run(bodies.loop, 6, segments, compiled):
            np.testing.assert_allclose(found, right, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("keras", ["2", "3"], ids=["keras2", "keras3"])
def test_fit(way: Way, on_cpu: Callable[[str], Pool], keras: str) -> None:
    """Under Keras 3, a GPU turns XLA on, unless the callback or ``replicate`` turns it off."""
    for mixed, replicate in ((False, False), (False, True), (True, False), (True, True)):
        [right] = on_cpu(keras).run(bodies.fit, mixed, replicate)
        tolerance = 2e-2 if mixed else 2e-3
        for found in way.pool(2, keras).run(bodies.fit, mixed, replicate):
            np.testing.assert_allclose(
                found, right, rtol=tolerance, atol=tolerance, err_msg=f"{mixed} {replicate}"
            )


@pytest.mark.parametrize("keras", ["2", "3"], ids=["keras2", "keras3"])
def test_divided_updates(
    way: Way, on_cpu: Callable[[str], Pool], tmp_path: Path, keras: str
) -> None:
    """NCCL has no reduce-scatter in TensorFlow, and each rank makes all updates there."""
    [(weights, slots)] = on_cpu(keras).run(bodies.divided_fit, str(tmp_path))
    ranks = way.pool(2, keras).run(bodies.divided_fit, str(tmp_path))
    for found, _ in ranks:
        np.testing.assert_allclose(found, weights, rtol=2e-3, atol=2e-3)
    np.testing.assert_allclose(ranks[0][1], slots, rtol=2e-3, atol=2e-3)


def test_the_first_segment_travels_during_backward(way: Way, tmp_path: Path) -> None:
    if way.apart:
        pytest.skip(
            "on several hosts the ranks compare their clocks, once per job, and a pool repeats a body"
        )
    way.pool(2, "3").run(bodies.traced_loop, str(tmp_path))
    ranks = read(tmp_path)
    assert len(ranks) == 2
    for rank in ranks:
        assert len(rank.segments) == 4
        later = rank.iterations[3:]
        assert later
        early = [one for one in later if one.allreduce[0][0] < one.bp_end]
        assert len(early) > len(later) / 2, [(one.allreduce, one.bp_end) for one in later]


def test_compiled_functions(way: Way) -> None:
    for found in way.pool(2, "3").run(body_compiled_functions, timeout=60):
        assert found.pop("afterwards") == "[2.0, 4.0]"
        refused = found.pop(
            "in a function that has been traced"
        )  # by TensorFlow itself; the second is on a GPU
        assert "unsupported operations" in refused or "Trying to access resource" in refused
        assert all(text.startswith("RuntimeError") and REMEDY in text for text in found.values())


def test_keras_3_turns_xla_on(way: Way) -> None:
    ranks = way.pool(2, "3")
    for result, _ in ranks.run(body_fit, "auto", False, False):
        assert (REMEDY in result) if way.on_gpu else result == "trained"
    for broadcast, replicate in ((True, False), (False, True)):
        found = ranks.run(body_fit, "auto", broadcast, replicate)
        assert [result for result, _ in found] == ["trained"] * 2
        assert ["XLA can't compile" in note for _, note in found] == [
            way.on_gpu and broadcast,
            False,
        ]


@pytest.mark.slow
def test_memory_is_flat(way: Way) -> None:
    steps = (
        1000 if way.apart else 10_000
    )  # ranks that share a GPU wait for each other's time slices in NCCL
    for grown in way.pool(2, "3").run(bodies.memory, steps, timeout=540):
        assert grown["host"] < 12  # MB
        assert grown["gpu"] < 1


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


def test_lines_of_horovods_scripts(way: Way, tmp_path: Path) -> None:
    script = BEGIN[: BEGIN.index("import tensorflow")] + PINNING
    for result in job.run(tmp_path, 2, script, timeout=60, **way.environment(tmp_path)):
        assert result.code == 0 and "sum 2.0" in result.output, result.output


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "function"])
def test_calls_that_differ(way: Way, tmp_path: Path, graph: bool) -> None:
    """The ranks compare their calls before NCCL gets anything, or it would wait forever or add up other tensors."""
    call = "step(other)" if graph else 'npu.distribute.all_reduce(other, "sum")'
    script = (
        BEGIN
        + f"other = tf.ones([4 + rank])\nprint(npu.distribute.all_reduce(tf.constant(1)))\n{call}\n"
    )
    for result in job.run(tmp_path, 2, script, timeout=60, **way.environment(tmp_path)):
        assert result.code == 1
        assert "different collective operations" in result.output
        assert "float32 [4]" in result.output and "float32 [5]" in result.output


@pytest.mark.parametrize("how", ["SIGKILL", "SIGSTOP"])
def test_a_rank_that_is_killed_or_stopped(way: Way, tmp_path: Path, how: str) -> None:
    script = (
        BEGIN
        + f"""
began = time.time()
try:
    for number in range(100_000):
        step(value)
        if (rank, number) == (1, 20):
            os.kill(os.getpid(), signal.{how})
except Exception as error:
    print(error, "seconds", time.time() - began, flush=True)
    os._exit(3)  # rank 0 would wait a while for one that is stopped
"""
    )
    environment = {
        **way.environment(tmp_path),
        "NPU_DEVICE_STALL_WARNING": "1",
        "NPU_DEVICE_STALL_TIMEOUT": "4",
    }
    ranks = job.start(tmp_path, 2, script, **environment)
    try:
        code = ranks[0].wait(60)
    finally:
        job.kill(ranks)
    output = ranks[0].output
    assert code == 3, output
    if how == "SIGSTOP":
        assert re.search(r"rank 1 on host \S+: does not answer: stopped", output)
    else:
        assert ranks[1].wait() == -signal.SIGKILL
        assert "rank 1 on host" in output or "task:1" in output
        assert float(output.rsplit("seconds ", 1)[1].split()[0]) < 15
