"""The iteration trace: how it is turned on, and what is written."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from npu_device._src.trace.recorder import PointSchema, Recorder, Schedule, read_options, settings
from npu_device._src.trace.records import FILE, GradientRecord, RankTrace, read

# How it is turned on


def test_nothing_is_traced_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PROFILING_MODE", "PROFILING_OPTIONS"):
        monkeypatch.delenv(name, raising=False)
    assert settings(False, '{"output": "x", "training_trace": "on"}') is None
    monkeypatch.setenv("PROFILING_OPTIONS", '{"output": "x"}')
    assert settings(False, None) is None
    monkeypatch.setenv("PROFILING_MODE", "dynamic")
    assert settings(False, None) is None


def test_the_script_goes_before_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PROFILING_MODE", "true")
    monkeypatch.setenv("PROFILING_OPTIONS", json.dumps({"output": str(tmp_path / "theirs")}))
    monkeypatch.setenv("NPU_DEVICE_TRACE_ITERATIONS", "3-5,10-10")
    found = settings(False, '{"output": "ignored"}')
    assert found is not None and found.output == tmp_path / "theirs"
    assert [number for number in range(12) if found.schedule.wants(number)] == [3, 4, 5, 10]
    options = json.dumps({"output": str(tmp_path / "mine"), "fp_point": "a", "storage_limit": "200MB"})
    mine = settings(True, options)
    assert mine is not None and mine.output == tmp_path / "mine"
    assert "profiling options without effect: fp_point, storage_limit" in caplog.text
    assert settings(True, '{"training_trace": "off"}') is None


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
    recorder = Recorder(tmp_path, HEAD, Schedule())
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
    recorder = Recorder(tmp_path, HEAD, Schedule())
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
    recorder = Recorder(tmp_path, HEAD, Schedule())
    for _ in range(3):
        recorder.add(metric, [100.0, 100.1, 100.2, 100.3])
        recorder.add(TWO, _points(100.0))
    recorder.close()
    [found] = read(tmp_path)
    assert found.gradients == TWO.gradients
    assert [one.iteration for one in found.iterations] == [1, 2, 3]


def test_another_cut_begins_another_part(tmp_path: Path) -> None:
    other = _schema((40, 4), ((0, 1),))
    recorder = Recorder(tmp_path, HEAD, Schedule())
    recorder.add(TWO, _points(100.0))
    for _ in range(2):
        recorder.add(other, [103.0, 104.0, 105.0, 105.5, 105.75])
    recorder.close()
    [found] = read(tmp_path)
    assert found.segments == ((0, 1),)
    assert found.iterations[0].allreduce == ((105_000_500, 105_500_500),)
