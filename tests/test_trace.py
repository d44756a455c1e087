"""The iteration trace: how it is turned on, and what is written."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from npu_device._src.trace.records import (
    FILE,
    GradientRecord,
    PointSchema,
    RankTrace,
    Recorder,
    Schedule,
    read,
    read_options,
    settings,
)


def test_nothing_is_traced_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PROFILING_MODE", raising=False)
    monkeypatch.setenv("PROFILING_OPTIONS", '{"output": "x"}')
    assert settings(False, '{"output": "x", "training_trace": "on"}') is None
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


@pytest.mark.parametrize("text", ["5-3", "0-4", "1-"])
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
    recorded = [number for number in range(1, 100_001) if Schedule().wants(number)]
    assert recorded[:100] == list(range(1, 101))
    assert len(recorded) < 650
    assert recorded[-1] > 98_000


HEAD = RankTrace(1, 2, "there", 7, 500.0, 20.0, "", "", "", (), ())


def _schema(sizes: tuple[int, ...], segments: tuple[tuple[int, int], ...]) -> PointSchema:
    gradients = tuple(GradientRecord(f"g{number}", "float32", size) for number, size in enumerate(sizes))
    shapes = tuple(f"({size // 4},)" for size in sizes)
    return PointSchema(gradients, shapes, segments, "hccl_world_group", "tensorflow", has_end=True)


TWO = _schema((40, 4), ((0, 0), (1, 1)))


def _points(begin: float) -> list[float]:
    """Forward for 1 s, two gradients, both reduced after 0.5 s, updated after 0.25 s more."""
    return [begin, begin + 1, begin + 2, begin + 1.5, begin + 2.5, begin + 2.75]


def recorded(directory: Path, *steps: tuple[PointSchema, list[float]]) -> RankTrace:
    """What can be read of the steps. Each line is there at once, without an orderly end."""
    recorder = Recorder(directory, HEAD, Schedule())
    for schema, points in steps:
        recorder.add(schema, points)
    [found] = read(directory)
    recorder.close()
    return found


def test_points_become_a_record(tmp_path: Path) -> None:
    found = recorded(tmp_path, (TWO, _points(100.0)), (TWO, _points(103.0)))
    about = {name: getattr(TWO, name) for name in ("model", "backend", "group", "gradients", "segments")}
    assert replace(found, iterations=()) == replace(HEAD, **about)
    first, second = found.iterations
    assert (first.fp_start, first.bp_end, first.iteration_end) == (100_000_500, 102_000_500, 102_750_500)
    assert first.ready == (101_000_500, 102_000_500)
    assert first.allreduce == ((101_000_500, 101_500_500), (102_000_500, 102_500_500))
    assert (first.previous_end, first.input_wait) == (None, None)
    assert second.previous_end == first.iteration_end
    assert (second.input_wait, second.time) == (250_000, 3_000_000)
    assert (second.hidden, second.exposed) == (500_000, 500_000)


def test_a_line_that_was_being_written_is_left_out(tmp_path: Path) -> None:
    recorded(tmp_path, (TWO, _points(100.0)))
    file = tmp_path / "rank1" / FILE
    file.write_text(file.read_text() + '{"iteration":2,"fp_st')
    assert [one.iteration for one in read(tmp_path)[0].iterations] == [1]
    file.write_text('{"version":1}\nnonsense\n')
    with pytest.raises(ValueError, match=r"iterations\.jsonl, line 2"):
        read(tmp_path)


def test_metrics_give_way_to_gradients(tmp_path: Path) -> None:
    metric = (_schema((4,), ((0, 0),)), [100.0, 100.1, 100.2, 100.3])
    found = recorded(tmp_path, *[metric, (TWO, _points(100.0))] * 3)
    assert found.gradients == TWO.gradients
    assert [one.iteration for one in found.iterations] == [1, 2, 3]


def test_another_cut_begins_another_part(tmp_path: Path) -> None:
    other = (_schema((40, 4), ((0, 1),)), [103.0, 104.0, 105.0, 105.5, 105.75])
    found = recorded(tmp_path, (TWO, _points(100.0)), other, other)
    assert found.segments == ((0, 1),)
    assert found.iterations[0].allreduce == ((105_000_500, 105_500_500),)
