"""The iteration trace: what is recorded, when, and how it is turned on."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from launcher import npurun, script
from pool import Pool

from npu_device._src.trace.point_schema import PointSchema
from npu_device._src.trace.recorder import Recorder
from npu_device._src.trace.records import FILE, GradientRecord, RankTrace, read
from npu_device._src.trace.schedule import Schedule
from npu_device._src.trace.settings import read_options, settings

STEPS = 6
PAUSE = 0.06
SLOW = 0.08
TOLERANCE_US = 20_000  # between a point and what it stands for, on a machine with other work


# How it is turned on


def test_nothing_is_traced_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PROFILING_MODE", "PROFILING_OPTIONS"):
        monkeypatch.delenv(name, raising=False)
    assert settings(False, '{"output": "x", "training_trace": "on"}') is None
    monkeypatch.setenv("PROFILING_OPTIONS", '{"output": "x"}')
    assert settings(False, None) is None
    monkeypatch.setenv("PROFILING_MODE", "dynamic")
    assert settings(False, None) is None


def test_the_script_goes_before_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PROFILING_MODE", "true")
    monkeypatch.setenv("PROFILING_OPTIONS", json.dumps({"output": str(tmp_path / "theirs"), "bp_point": "b"}))
    monkeypatch.setenv("NPU_DEVICE_TRACE_ITERATIONS", "3-5,10-10")
    found = settings(False, '{"output": "ignored"}')
    assert found is not None and (found.output, found.bp_point) == (tmp_path / "theirs", "b")
    assert [number for number in range(12) if found.schedule.wants(number)] == [3, 4, 5, 10]
    options = json.dumps({"output": str(tmp_path / "mine"), "fp_point": "a", "storage_limit": "200MB"})
    mine = settings(True, options)
    assert mine is not None
    assert (mine.output, mine.fp_point, mine.bp_point) == (tmp_path / "mine", "a", "")
    assert mine.storage_limit == 200_000_000
    assert settings(True, '{"training_trace": "off"}') is None
    with pytest.raises(ValueError, match=r"storage_limit.*'a lot'.*megabytes"):
        settings(True, '{"storage_limit": "a lot"}')


@pytest.mark.parametrize("text", ["5-3", "0-4", "1-", "a-b", "1-2;3-4"])
def test_windows_have_a_form(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("PROFILING_MODE", "true")
    monkeypatch.setenv("NPU_DEVICE_TRACE_ITERATIONS", text)
    with pytest.raises(ValueError, match=r"EI0001.*NPU_DEVICE_TRACE_ITERATIONS"):
        settings(False, None)


@pytest.mark.parametrize(
    "text",
    ["{'output':'/t','fp_point':''}", '{"output":"/t,"fp_point":""}', '{"output":"/t" "fp_point":""', "output:/t"],
)
def test_options_with_slips_are_read_with_a_warning(text: str, caplog: pytest.LogCaptureFixture) -> None:
    assert read_options(text)["output"] == "/t"
    assert "not a JSON object" in caplog.text


def test_a_long_run_leaves_few_iterations() -> None:
    recorded = [number for number in range(1, 1_000_001) if Schedule().wants(number)]
    assert recorded[:100] == list(range(1, 101))
    assert len(recorded) < 900
    assert recorded[-1] > 980_000


# What is written

HEAD = RankTrace(1, 2, "there", 7, 500.0, 20.0, "", "", "", (), ())


def _schema(sizes: tuple[int, ...], segments: tuple[tuple[int, int], ...]) -> PointSchema:
    gradients = tuple(GradientRecord(f"g{number}", "float32", size) for number, size in enumerate(sizes))
    shapes = tuple(f"({size // 4},)" for size in sizes)
    return PointSchema(gradients, shapes, segments, "hccl_world_group", "tensorflow", has_end=True)


TWO = _schema((40, 4), ((0, 0), (1, 1)))


def _points(begin: float) -> list[float]:
    """Forward for 1 s, two gradients, both reduced after 0.5 s, updated after 0.25 s more."""
    return [begin, begin + 1, begin + 2, begin + 1.5, begin + 2.5, begin + 2.75]


def test_points_become_a_record(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, HEAD, Schedule(), None)
    for begin in (100.0, 103.0):
        recorder.add(TWO, _points(begin))
    # Each line is there at once, without an orderly end.
    [found] = read(tmp_path)
    recorder.close()
    assert replace(found, iterations=()) == replace(
        HEAD, model=TWO.model, backend="tensorflow", group="hccl_world_group", gradients=TWO.gradients,
        segments=TWO.segments,
    )  # fmt: skip
    first, second = found.iterations
    assert (first.fp_start, first.bp_end, first.iteration_end) == (100_000_500, 102_000_500, 102_750_500)
    assert first.ready == (101_000_500, 102_000_500)
    assert first.allreduce == ((101_000_500, 101_500_500), (102_000_500, 102_500_500))
    assert (first.previous_end, first.input_wait) == (None, None)
    assert second.previous_end == first.iteration_end
    assert (second.input_wait, second.time) == (250_000, 3_000_000)
    assert (second.hidden, second.exposed) == (500_000, 500_000)


def test_a_line_that_was_being_written_is_left_out(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, HEAD, Schedule(), None)
    recorder.add(TWO, _points(100.0))
    with (tmp_path / "rank1" / FILE).open("a") as file:
        file.write('{"iteration":2,"fp_st')
    assert [one.iteration for one in read(tmp_path)[0].iterations] == [1]
    recorder.close()
    (tmp_path / "rank1" / FILE).write_text('{"version":1}\nnonsense\n')
    with pytest.raises(ValueError, match=r"iterations\.jsonl, line 2"):
        read(tmp_path)


def test_metrics_give_way_to_gradients(tmp_path: Path) -> None:
    metric = _schema((4,), ((0, 0),))
    recorder = Recorder(tmp_path, HEAD, Schedule(), None)
    for _ in range(3):
        recorder.add(metric, [100.0, 100.1, 100.2, 100.3])
        recorder.add(TWO, _points(100.0))
    recorder.close()
    [found] = read(tmp_path)
    assert found.gradients == TWO.gradients
    assert [one.iteration for one in found.iterations] == [1, 2, 3]


def test_another_cut_begins_another_part(tmp_path: Path) -> None:
    other = _schema((40, 4), ((0, 1),))
    recorder = Recorder(tmp_path, HEAD, Schedule(), None)
    recorder.add(TWO, _points(100.0))
    for _ in range(2):
        recorder.add(other, [103.0, 104.0, 105.0, 105.5, 105.75])
    recorder.close()
    [found] = read(tmp_path)
    assert found.segments == ((0, 1),)
    assert found.iterations[0].allreduce == ((105_000_500, 105_500_500),)


def test_the_file_stays_within_its_limit(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, HEAD, Schedule(((1, 10_000),)), 4_000)
    for number in range(200):
        recorder.add(TWO, _points(100.0 + 3 * number))
    recorder.close()
    assert (tmp_path / "rank1" / FILE).stat().st_size <= 4_000
    numbers = [one.iteration for one in read(tmp_path)[0].iterations]
    assert len(numbers) >= 3
    assert numbers == list(range(numbers[0], 201))


# What a real step leaves


def _start(directory: str, **points: str) -> Any:
    from npu_device._src.cluster import runtime
    from npu_device._src.trace import trace
    from npu_device._src.trace.settings import Settings

    running = runtime.current()
    if running is not None:
        trace.start(running, Settings(Path(directory), **points))
    return running


def _slow(tf: Any) -> Any:
    """A layer's function whose backward takes a while."""

    @tf.custom_gradient
    def slow(value: Any) -> Any:
        return tf.identity(value), lambda upstream: tf.ensure_shape(
            tf.numpy_function(_nap, [upstream], tf.float32), upstream.shape
        )

    return slow


def _train(directory: str) -> list[str]:
    """Wrapped optimizer in a tf.function; rank 1 comes late to each step. Returns the types of the graph's
    operations that a Timestamp waits for.
    """
    import tensorflow as tf

    import npu_device as npu
    from hccl.split.api import set_split_strategy_by_idx
    from npu_device._src.gradients import split_strategy
    from npu_device._src.trace import trace

    running = _start(directory)
    set_split_strategy_by_idx([0, 1])
    try:
        slow = _slow(tf)
        first, second = tf.Variable(tf.ones([8, 8])), tf.Variable(tf.ones([8, 8]))
        optimizer = npu.distribute.npu_distributed_keras_optimizer_wrapper(tf.keras.optimizers.Adam(0.1))

        @tf.function
        def step(x: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(slow(x @ first) @ second)
            gradients = tape.gradient(loss, [first, second])
            optimizer.apply_gradients(zip(gradients, [first, second]))
            return loss

        x = tf.ones([4, 8])
        for _ in range(STEPS):
            if running is not None and running.cluster.rank == 1:
                time.sleep(PAUSE)
            step(x)
        stamps = [op for op in step.get_concrete_function(x).graph.get_operations() if op.type == "Timestamp"]
        return [f"{op.type} {before.type}" for op in stamps for before in op.control_inputs]
    finally:
        split_strategy.clear()
        trace.stop()


def test_the_points_of_a_step(keras_ranks: Pool, tmp_path: Path) -> None:
    waits = keras_ranks.run(_train, str(tmp_path))
    traces = read(tmp_path)
    if keras_ranks.size == 1:
        assert not traces and waits == [[]]
        return
    assert all("Timestamp Timestamp" not in found and len(found) > 3 for found in waits)
    assert [trace.rank for trace in traces] == list(range(keras_ranks.size))
    for trace in traces:
        assert [gradient.bytes for gradient in trace.gradients] == [256, 256]
        assert trace.segments == ((0, 0), (1, 1))
        assert [one.iteration for one in trace.iterations] == list(range(1, STEPS + 1))
        for one in trace.iterations[2:]:
            assert one.fp_start <= one.ready[0] < one.ready[1] == one.bp_end <= one.last_reduced <= one.iteration_end
            assert one.ready[1] - one.ready[0] > SLOW * 1e6 - TOLERANCE_US
            for (start, end), ready in zip(one.allreduce, one.ready):
                assert ready == start <= end
    late = next(trace for trace in traces if trace.rank == 1)
    assert all((one.input_wait or 0) > PAUSE * 1e6 - TOLERANCE_US for one in late.iterations[2:])
    assert len({trace.model for trace in traces}) == 1


def _by_hand(directory: str, kind: str) -> None:
    """Gradients reduced with all_reduce, and a metric beside them."""
    import tensorflow as tf

    import npu_device as npu
    from npu_device._src.trace import trace

    _start(directory)
    table, weights = tf.Variable(tf.ones([20, 3])), tf.Variable(tf.ones([3, 3]))

    def step() -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(table, [1, 2]) @ weights)
        gradients = npu.distribute.all_reduce(tape.gradient(loss, [weights, table]))
        weights.assign_sub(gradients[0])
        npu.distribute.all_reduce(loss)

    @tf.function
    def loop() -> None:
        for _ in tf.range(STEPS):
            step()

    try:
        if kind == "loop":
            loop()
        for _ in range(STEPS if kind == "eager" else 0):
            step()
    finally:
        trace.stop()


@pytest.mark.parametrize("kind", ["eager", "loop"])
def test_gradients_that_are_reduced_by_hand(two_ranks: Pool, tmp_path: Path, kind: str) -> None:
    two_ranks.run(_by_hand, str(tmp_path), kind)
    for trace in read(tmp_path):
        assert [gradient.dtype for gradient in trace.gradients] == ["float32", "sparse float32"]
        assert trace.gradients[0].bytes == 36
        assert [one.iteration for one in trace.iterations] == list(range(1, STEPS + 1))
        for before, one in zip(trace.iterations, trace.iterations[1:]):
            assert before.iteration_end <= one.fp_start + TOLERANCE_US
            assert one.fp_start <= one.bp_end <= one.last_reduced == one.iteration_end


def _named(directory: str) -> None:
    """Operations that take a while between inputs and fp_point, and between bp_point and the last gradient."""
    import tensorflow as tf

    import npu_device as npu
    from npu_device._src.trace import trace

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
        trace.stop()


def _nap(value: Any) -> Any:
    time.sleep(SLOW)
    return value


def test_points_may_be_named(two_ranks: Pool, tmp_path: Path) -> None:
    two_ranks.run(_named, str(tmp_path))
    for trace in read(tmp_path):
        for one in trace.iterations[1:]:
            # The first nap is over before forward starts, and the second begins after backward's end.
            assert (one.input_wait or 0) > SLOW * 1e6 - TOLERANCE_US
            assert max(one.ready) - one.bp_end > SLOW * 1e6 - TOLERANCE_US
            assert one.fp_start <= one.bp_end


def _without() -> int:
    import tensorflow as tf

    import npu_device as npu

    @tf.function
    def step(x: Any) -> Any:
        return npu.distribute.all_reduce([x, x])

    operations = step.get_concrete_function(tf.ones([2])).graph.get_operations()
    return sum(op.type in ("Timestamp", "QueueEnqueueV2") for op in operations)


def test_without_a_trace_nothing_is_added(two_ranks: Pool) -> None:
    assert two_ranks.run(_without) == [0, 0]


def _clock() -> tuple[float, float | None]:
    from npu_device._src.cluster import runtime
    from npu_device._src.trace import clock

    running = runtime.current()
    assert running is not None
    apart = replace(running.cluster, hosts=("here", "there"), host=("here", "there")[running.cluster.rank])
    found = clock.measure(SimpleNamespace(cluster=apart, store=running.store))  # type: ignore[arg-type]
    return found.offset_us, found.error_us


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
    y = x
    for weight in weights:
        y = tf.matmul(y, weight)
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
    assert b"npu-trace t" in ended.stderr
    traces = read(tmp_path / "t")
    assert [len(trace.iterations) for trace in traces] == [6, 6]
    for one in traces[0].iterations:
        assert one.fp_start <= min(one.ready) <= one.bp_end <= one.iteration_end
    assert {"report.html", "step_trace.csv", "trace.json"} <= set(os.listdir(tmp_path / "t"))
    report = (tmp_path / "t" / "report.txt").read_text()
    assert "3 gradients" in report and "rank 1" in report
