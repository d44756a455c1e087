"""The iteration trace of real steps: what their points say, on several ranks, in functions, loops and sessions."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tensorflow as tf
from caught_messages import hears
from launcher import npurun, script
from pool import Pool

import npu_device as npu
from hccl.split.api import set_split_strategy_by_idx
from npu_device._src.collectives.job import current
from npu_device._src.gradients import split_strategy
from npu_device._src.trace import trace as tracing
from npu_device._src.trace.records import Settings, read

STEPS = 5
PAUSE = 0.08
LEAST_US = PAUSE * 1e6 / 4  # what is seen of a pause at the least, on a machine with other work
TOLERANCE_US = 60_000  # between a point and what it stands for


def _start(directory: str, **options: str) -> Any:
    running = current()
    assert running is not None
    tracing.start(running, Settings(Path(directory), **options))
    return running


def _nap(value: Any) -> Any:
    time.sleep(PAUSE)
    return value


@tf.custom_gradient
def _slow(value: Any) -> Any:
    """Backward takes a while."""
    return tf.identity(value), lambda upstream: tf.ensure_shape(
        tf.numpy_function(_nap, [upstream], tf.float32), upstream.shape
    )


def _train(directory: str) -> list[str]:
    """Wrapped optimizer in a tf.function; rank 1 comes late to each step. Returns the types of the graph's
    operations that a Timestamp waits for.
    """
    running = _start(directory)
    set_split_strategy_by_idx([0, 1])
    try:
        first, second = tf.Variable(tf.ones([8, 8])), tf.Variable(tf.ones([8, 8]))
        optimizer = npu.distribute.npu_distributed_keras_optimizer_wrapper(
            tf.keras.optimizers.Adam(0.1)
        )

        @tf.function
        def step(x: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(_slow(x @ first) @ second)
            gradients = tape.gradient(loss, [first, second])
            optimizer.apply_gradients(zip(gradients, [first, second]))

        x = tf.ones([4, 8])
        for _ in range(STEPS):
            if running.cluster.rank == 1:
                time.sleep(PAUSE)
            step(x)
        stamps = [
            op
            for op in step.get_concrete_function(x).graph.get_operations()
            if op.type == "Timestamp"
        ]
        return [before.type for op in stamps for before in op.control_inputs]
    finally:
        split_strategy.forget_strategies()
        tracing.stop()


def test_the_points_of_a_step(keras_two_ranks: Pool, tmp_path: Path) -> None:
    waits = keras_two_ranks.run(_train, str(tmp_path))
    traces = read(tmp_path)
    assert all("Timestamp" not in found and len(found) > 3 for found in waits)
    assert [trace.rank for trace in traces] == [0, 1]
    for trace in traces:
        assert [gradient.bytes for gradient in trace.gradients] == [256, 256]
        assert trace.segments == ((0, 0), (1, 1))
        assert [one.iteration for one in trace.iterations] == list(range(1, STEPS + 1))
        assert any(
            one.reduced < one.iteration_end for one in trace.iterations
        )  # the update takes a while
        for one in trace.iterations[2:]:
            assert (
                one.fp_start
                <= one.ready[0]
                < one.ready[1]
                == one.bp_end
                <= one.reduced
                <= one.iteration_end
            )
            assert one.ready[1] - one.ready[0] > LEAST_US
            for (start, end), ready in zip(one.allreduce, one.ready):
                assert ready == start <= end
    late = next(trace for trace in traces if trace.rank == 1)
    assert all(one.input_wait > LEAST_US for one in late.iterations[2:])
    assert len({trace.model for trace in traces}) == 1


def _named(directory: str) -> None:
    """Operations that take a while, between inputs and fp_point, and between bp_point and the last gradient."""
    _start(directory, fp_point="first", bp_point="last")
    try:

        @tf.function
        def step(x: Any) -> Any:
            late = tf.ensure_shape(tf.numpy_function(_nap, [x], tf.float32), [2])
            gradient = tf.identity(tf.identity(late, name="first") * 2.0, name="last")
            later = tf.ensure_shape(tf.numpy_function(_nap, [gradient], tf.float32), [2])
            return npu.distribute.all_reduce([gradient, later])

        for _ in range(STEPS):
            step(tf.ones([2]))
    finally:
        tracing.stop()


def test_points_may_be_named(two_ranks: Pool, tmp_path: Path) -> None:
    two_ranks.run(_named, str(tmp_path))
    for trace in read(tmp_path):
        for one in trace.iterations[1:]:
            # The first nap is over before forward starts, and the second begins after the end of backward.
            assert one.input_wait > LEAST_US
            assert max(one.ready) - one.bp_end > LEAST_US
            assert one.fp_start <= one.bp_end


@hears
def _misnamed(said: list[str], directory: str) -> list[str]:
    _start(directory, fp_point="no such operation")
    try:
        tf.function(npu.distribute.all_reduce)([tf.ones([2])])
        return said
    finally:
        tracing.stop()


def test_a_point_that_is_not_there(two_ranks: Pool, tmp_path: Path) -> None:
    for said in two_ranks.run(_misnamed, str(tmp_path)):
        assert any("no operation 'no such operation'" in text for text in said)
    assert all(trace.iterations for trace in read(tmp_path))


def _by_hand(directory: str, kind: str) -> int:
    """Gradients reduced with all_reduce, and a metric beside them. Returns how much a later function has of a trace."""
    _start(directory)
    table, weights = tf.Variable(tf.ones([20, 3])), tf.Variable(tf.ones([3, 3]))

    def step() -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(table, [1, 2]) @ weights)
        gradients = npu.distribute.all_reduce(tape.gradient(loss, [weights, table]))
        weights.assign_sub(gradients[0])
        npu.distribute.all_reduce(loss)

    def steps() -> None:
        for _ in tf.range(STEPS):
            step()

    try:
        tf.function(steps)() if kind == "loop" else steps()
    finally:
        tracing.stop()
    return _without()


def _without() -> int:
    graph = tf.function(npu.distribute.all_reduce).get_concrete_function([tf.ones([2])]).graph
    return sum(op.type in ("Timestamp", "QueueEnqueueV2") for op in graph.get_operations())


def test_without_a_trace_nothing_is_added(two_ranks: Pool) -> None:
    assert two_ranks.run(_without) == [0, 0]


@pytest.mark.parametrize("kind", ["eager", "loop"])
def test_gradients_that_are_reduced_by_hand(two_ranks: Pool, tmp_path: Path, kind: str) -> None:
    assert two_ranks.run(_by_hand, str(tmp_path), kind) == [0, 0]
    for trace in read(tmp_path):
        assert [gradient.dtype for gradient in trace.gradients] == ["float32", "sparse float32"]
        assert trace.gradients[0].bytes == 36
        assert [one.iteration for one in trace.iterations] == list(range(1, STEPS + 1))
        for before, one in zip(trace.iterations, trace.iterations[1:]):
            assert before.iteration_end <= one.fp_start + TOLERANCE_US
            assert one.fp_start <= one.bp_end <= one.reduced == one.iteration_end


def _clock() -> tuple[float, float | None]:
    running = current()
    assert running is not None
    job: Any = SimpleNamespace(cluster=replace(running.cluster, hosts=("here", "there")))
    job.control, job.health = running.control, running.health
    return tracing.measure_clock(job)


def test_clocks_of_hosts_are_compared(two_ranks: Pool) -> None:
    [mine, theirs] = two_ranks.run(_clock)
    assert mine == (0.0, 0.0)
    # It is one clock in truth.
    offset, error = theirs
    assert error is not None and 0 < error < 50_000
    assert abs(offset) <= error


SESSION = """
    import tensorflow as tf
    tf.compat.v1.disable_eager_execution()
    import npu_device as npu
    npu.open()
    v1 = tf.compat.v1
    x = v1.placeholder(tf.float32, [4, 8])
    weights = [v1.get_variable(f"w{i}", [8, 8]) for i in range(3)]
    y = x @ weights[0] @ weights[1] @ weights[2]
    gradients = npu.distribute.all_reduce(tf.gradients(tf.reduce_sum(y), weights))
    train = v1.train.GradientDescentOptimizer(0.01).apply_gradients(list(zip(gradients, weights)))
    with v1.Session() as session:
        session.run(v1.global_variables_initializer())
        for _ in range(6):
            session.run(train, {x: [[1.0] * 8] * 4})
"""


@pytest.mark.slow
def test_a_job_in_a_session_leaves_trace_and_report(tmp_path: Path) -> None:
    ended = npurun("-n", "2", "--trace", "t", script(tmp_path, SESSION), cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr.decode()
    assert b"npurun trace t" in ended.stderr and b"opened npu_device" not in ended.stderr
    traces = read(tmp_path / "t")
    assert [len(trace.iterations) for trace in traces] == [6, 6]
    for one in traces[0].iterations:
        assert one.fp_start <= min(one.ready) <= one.bp_end <= one.iteration_end
    assert {"report.html", "trace.json"} <= set(os.listdir(tmp_path / "t"))
    report = (tmp_path / "t" / "report.txt").read_text()
    assert "3 gradients" in report and "rank 1" in report
