"""The iteration trace: how it is turned on, what is written; and its report (figures, diagnosis, Perfetto's file, page)
from traces whose truth is known.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import chromium
import pytest

from npu_device._src.gradients import split_strategy
from npu_device._src.report import report_files
from npu_device._src.report.__main__ import main
from npu_device._src.report.analysis import analyse, diagnose
from npu_device._src.report.picture import COLOURS
from npu_device._src.report.report_files import write_all
from npu_device._src.report.summary import summary
from npu_device._src.trace import records
from npu_device._src.trace.records import (
    FILE,
    GradientRecord,
    PointSchema,
    RankTrace,
    Settings,
    is_recorded,
    read,
    settings,
)

GRADIENTS = 10
STEPS = 9
MB = 1_000_000
MS = 1_000.0


def trace(
    rank: int = 0,
    segments: Sequence[tuple[int, int]] = ((0, 8), (9, 9)),
    takes: float = 3.0,
    slower: float = 0.0,
    wait: float = 5.0,
    dtypes: Sequence[str] = ("float32",) * GRADIENTS,
    hosts: Sequence[str] = ("a", "a"),
) -> RankTrace:
    """A rank of two. Forward takes 50 ms, then a gradient of 1 MB comes each 5 ms; a segment takes ``takes`` ms a MB,
    one after the other; then 10 ms for the update, and ``wait`` ms for the input.
    """
    done, iterations = 1_795_307_704_330_887.25, []
    for number in range(1, STEPS + 1):
        previous, start = done, done + wait * MS
        ready = tuple(start + (50 + 5 * (place + 1) + slower) * MS for place in range(GRADIENTS))
        reductions, over = [], 0.0
        for first, last in segments:
            over = max(over, ready[last]) + takes * (last - first + 1) * MS
            reductions.append([ready[last], over])
        done = over + 10 * MS
        before = previous if number > 1 else None
        iterations.append(
            records.Iteration(number, start, ready[-1], done, tuple(reductions), ready, before)
        )
    gradients = tuple(GradientRecord(f"g{place}", dtypes[place], MB) for place in range(GRADIENTS))
    error = None if len(set(hosts)) > 1 and rank else 0.0
    model = ("m", "shared_memory", "hccl_world_group")
    return RankTrace(
        rank, 2, hosts[rank], 1, 0.0, error, *model, gradients, tuple(segments), tuple(iterations)
    )


def write(directory: Path, traces: Sequence[RankTrace]) -> None:
    for one in traces:
        lines = [one.header(), *(iteration.__dict__ for iteration in one.iterations)]
        (directory / f"rank{one.rank}").mkdir(parents=True)
        (directory / f"rank{one.rank}" / FILE).write_text(
            "".join(json.dumps(line) + "\n" for line in lines)
        )


def test_where_the_time_goes() -> None:
    # Segment 0 is ready at 95 ms and takes 27 ms, segment 1 ends at 125 ms; backward ends at 100 ms.
    result = analyse([trace(0), trace(1)])
    first = result.ranks[0]
    parts = (first.step, first.input_wait, first.alone, first.hidden, first.exposed, first.update)
    assert parts == pytest.approx((140e3, 5e3, 95e3, 5e3, 25e3, 10e3))
    text = summary(result)
    assert "no rank is slower" in text
    assert "the clock of the same host" in text
    assert "on its slowest rank, a step takes 140.0 ms" in text
    text = summary(analyse([trace(0)]))
    assert (
        "no trace of rank(s) 1. What to do: bring the directories rank<N> of all hosts together"
        in text
    )


def _with_gather(plain: RankTrace) -> RankTrace:
    """Return a trace in which the last 4 ms of each iteration exchange the values of a divided update."""
    iterations = tuple(
        replace(iteration, update_end=iteration.iteration_end - 4 * MS)
        for iteration in plain.iterations
    )
    return replace(plain, iterations=iterations)


def test_an_update_is_divided_or_the_option_is_named(tmp_path: Path) -> None:
    divided = [_with_gather(trace(0)), _with_gather(trace(1))]
    write(tmp_path, divided)
    result = analyse(records.read(tmp_path))
    assert (result.ranks[0].update, result.ranks[0].gather) == pytest.approx((6e3, 4e3))
    assert "gather" in summary(result)
    whole = [trace(0), trace(1)]
    ranks = analyse(whole).ranks
    assert "gather" not in summary(analyse(whole))
    # Two ranks save half of an update: 5 of 140 ms aren't worth it.
    assert "shard_optimizer" not in diagnose(whole, ranks).expectation
    slow = [replace(rank, update=60e3) for rank in ranks]
    assert "shard_optimizer=True divides it" in diagnose(whole, slow).expectation
    slow = [replace(rank, update=60e3) for rank in result.ranks]
    assert "shard_optimizer" not in diagnose(divided, slow).expectation


CAUSES = [({"slower": 20.0}, "forward and backward"), ({"wait": 25.0}, "waiting for input")]


@pytest.mark.parametrize(("changed", "cause"), CAUSES)
def test_the_slowest_rank_is_named_with_its_cause(changed: dict[str, Any], cause: str) -> None:
    result = analyse([trace(0, hosts=("a", "b")), trace(1, hosts=("a", "b"), **changed)])
    assert result.slowest is not None
    assert (result.slowest.rank, result.slowest.host, result.slowest.cause) == (1, "b", cause)
    assert result.slowest.late == pytest.approx(20e3)
    assert f"the other rank waits for rank 1 on host b: it is 20.0 ms later, in {cause}" in summary(
        result
    )
    assert "could not be compared" in summary(result)


@pytest.mark.parametrize(
    ("segments", "takes", "situation", "reason"),
    [
        (
            ((0, 2), (3, 9)),
            3.0,
            "the last one is long: move the cut back",
            "end 26.0 ms before the backward pass",
        ),
        (
            ((0, 7), (8, 9)),
            3.0,
            "after the backward pass: move the cut forward",
            "end 14.0 ms after the backward pass",
        ),
        (
            ((0, 9),),
            3.0,
            "ends after the backward pass: add segments",
            "The only segment has all of the bytes",
        ),
        (((0, 8), (9, 9)), 3.0, "ends after the backward pass: add segments", "90% of the bytes"),
        (((0, 8), (9, 9)), 0.1, "hidden behind backward", "0.1 ms of each step is exposed"),
    ],
)
def test_the_situations_of_the_guide(
    segments: Any, takes: float, situation: str, reason: str
) -> None:
    diagnosis = analyse([trace(rank, segments, takes) for rank in range(2)]).diagnosis
    assert situation in diagnosis.situation
    assert reason in diagnosis.reasons
    assert (diagnosis.call is None) == (takes < 1)


def test_the_call_can_be_pasted_and_helps() -> None:
    """The proposed split is better than the present one, in the world that the trace comes from."""
    before = analyse([trace(0, ((0, 9),)), trace(1, ((0, 9),))])
    call = before.diagnosis.call
    assert call == "set_split_strategy_by_size([25, 25, 25, 25])"
    assert call in summary(before)
    ends = split_strategy.cut_by_size([MB] * GRADIENTS, [25, 25, 25, 25])
    segments = tuple(split_strategy.bounds(ends))
    after = analyse([trace(0, segments), trace(1, segments)])
    assert after.ranks[0].exposed < before.ranks[0].exposed / 2
    assert after.diagnosis.call is None


@pytest.mark.parametrize(
    ("takes", "hosts", "dtype"),
    [
        (8.0, "ab", "float32"),
        (3.0, "ab", "float32"),
        (8.0, "aa", "float32"),
        (8.0, "ab", "bfloat16"),
    ],
)
def test_16_bits_are_advised_where_the_network_is_the_limit(
    takes: float, hosts: str, dtype: str
) -> None:
    """On two hosts at 1 Gbit/s, if the gradients have 32 bits."""
    ranks = [
        trace(rank, takes=takes, dtypes=(dtype,) * GRADIENTS, hosts=tuple(hosts))
        for rank in range(2)
    ]
    said = analyse(ranks).diagnosis.expectation
    advised = (takes, hosts, dtype) == (8.0, "ab", "float32")
    assert ("Each host sends 1.0 Gbit/s" in said) == ('compression="bf16"' in said) == advised


def test_traces_of_several_splits_are_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, segments in {"one": ((0, 9),), "four": ((0, 2), (3, 4), (5, 7), (8, 9))}.items():
        write(tmp_path / name, [trace(0, segments), trace(1, segments)])
    main([str(tmp_path / "one"), str(tmp_path / "four")])
    _, one, four = (line.split()[1:] for line in capsys.readouterr().out.splitlines()[-3:])
    assert (one, four) == (["1", "30.0", "145.0"], ["4", "6.0", "121.0"])


def test_without_a_trace_it_says_so(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"npurun trace: .*there is no trace in the directory"):
        main([str(tmp_path)])
    with pytest.raises(
        SystemExit, match=r"npurun trace: .*/nope: there is no trace: no such directory"
    ):
        main([str(tmp_path / "nope")])


def test_the_trace_follows_the_event_format(tmp_path: Path) -> None:
    traces = [trace(0, wait=4.9999), trace(1, wait=5.0001, slower=0.3333)]
    write(tmp_path, traces)
    write_all(tmp_path)
    document = json.loads((tmp_path / "trace.json").read_text())
    assert document["displayTimeUnit"] in ("ms", "ns")
    events = document["traceEvents"]
    spans, arrows = defaultdict(list), defaultdict(list)
    named = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    for event in events:
        assert isinstance(event["name"], str) and isinstance(event["args"], dict)
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int) and event["tid"] >= 2
        if event["ph"] == "M":
            assert event["name"] in (
                "process_name",
                "thread_name",
                "process_sort_index",
                "thread_sort_index",
            )
            continue
        line = (event["pid"], event["tid"])
        assert event["ph"] in ("X", "s", "t") and event["cat"] and line in named
        assert isinstance(event["ts"], int) and 0 <= event["ts"] < 1e9
        if event["ph"] == "X":
            assert isinstance(event["dur"], int) and event["dur"] >= 0
            spans[line].append((event["ts"], event["ts"] + event["dur"]))
        else:
            assert isinstance(event["id"], int)
            arrows[event["cat"], event["id"]].append((event["ph"], line, event["ts"]))
    # On one line nothing overlaps, or viewers drop it; each arrow goes from a span to another.
    for on_line in map(sorted, spans.values()):
        assert all(before[1] <= after[0] for before, after in zip(on_line, on_line[1:]))
    assert [[kind for kind, _, _ in arrow] for arrow in arrows.values()] == [["s", "t"]] * 2 * (
        STEPS - 1
    )
    begins = {(line, begin) for line, on_line in spans.items() for begin, _ in on_line}
    assert all(end[1:] in begins for arrow in arrows.values() for end in arrow)
    names = {event["name"] for event in events if event["pid"] == 1}
    assert {
        "Iteration 2",
        "FP_BP Time 2",
        "Iteration Refresh 2",
        "Reduce_2_0",
        "Reduce_2_1",
    } <= names
    reduce = next(event for event in events if event["name"] == "Reduce_2_1")
    start, end = map(round, traces[0].iterations[1].allreduce[1])
    assert (reduce["ts"] + document["otherData"]["Origin(us)"], reduce["dur"]) == (
        start,
        end - start,
    )
    assert reduce["args"] == {"Iteration ID": 2, "Reduce Start 1": start, "Reduce End 1": end}


def test_the_report_replaces_its_own_files_only(tmp_path: Path) -> None:
    write(tmp_path, [trace(0), trace(1)])
    names = ("report.html", "report.txt", "trace.json")
    for _ in range(2):
        write_all(tmp_path)
        assert {path.name for path in tmp_path.iterdir() if path.is_file()} == set(names)
        assert not (tmp_path / "npu_report").exists()
    for name in names:
        own = (tmp_path / name).read_text()
        theirs = {"trace.json": '{"traceEvents": [{"name": "a", "pid": 1}]}'}.get(name, "theirs")
        (tmp_path / name).write_text(theirs)
        report_files.write_report(tmp_path)
        assert (tmp_path / name).read_text() == theirs
        assert (tmp_path / "npu_report" / name).read_text() == own
        (tmp_path / name).write_text(own)


def test_the_page_draws_a_step_and_loads_nothing(tmp_path: Path) -> None:
    hostile = ("<b>&x", "a")
    write(tmp_path, [trace(0, hosts=hostile), trace(1, hosts=hostile, slower=20)])
    write_all(tmp_path)
    text = (tmp_path / "report.html").read_text()
    assert not re.search(
        r"<script|<link|url\(|@import|\b(src|href|srcset|data|action)=|https?://", text
    )
    assert "<b>&x" not in text and "<pre>10 gradients" in text
    bars = re.findall(r'<i style="[^"]*background:(#\w{6})[^"]*" title="([^"]*)">', text)
    # Only a divided update has a gather.
    assert {colour for colour, _ in bars} == set(COLOURS.values()) - {COLOURS["gather"]}
    exposed = next(title for colour, title in bars if colour == COLOURS["exposed reduction"])
    assert exposed == "rank 0, segment 0: gradients 0 to 8, 9.0 MB, 27.00 ms"


@pytest.mark.skipif(not chromium.PROGRAM, reason="no chromium")
def test_a_browser_draws_the_page(tmp_path: Path) -> None:
    write(tmp_path, [trace(0), trace(1, slower=20)])
    write_all(tmp_path)
    chromium.draw((tmp_path / "report.html").as_uri(), tmp_path, tmp_path / "page.png", "640,1400")


def test_nothing_is_traced_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PROFILING_MODE", raising=False)
    monkeypatch.setenv("PROFILING_OPTIONS", '{"output": "x"}')
    assert settings(False, '{"output": "x", "training_trace": "on"}') is None
    monkeypatch.setenv("PROFILING_MODE", "dynamic")
    assert settings(False, None) is None


def test_the_script_goes_before_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PROFILING_MODE", "true")
    monkeypatch.setenv("PROFILING_OPTIONS", json.dumps({"output": str(tmp_path / "theirs")}))
    monkeypatch.setenv("NPU_DEVICE_TRACE_ITERATIONS", "3-5,10-10")
    found = settings(False, '{"output": "ignored"}')
    assert found is not None and found.output == tmp_path / "theirs"
    assert [number for number in range(12) if is_recorded(number, found.windows)] == [3, 4, 5, 10]
    mine = settings(
        True,
        json.dumps({"output": str(tmp_path / "mine"), "fp_point": "a", "storage_limit": "200MB"}),
    )
    assert mine is not None and mine.output == tmp_path / "mine"
    assert (mine.fp_point, mine.bp_point, mine.storage_limit) == ("a", "", 200_000_000)
    with pytest.raises(ValueError, match=r"storage_limit.*'a lot'.*megabytes"):
        settings(True, '{"storage_limit": "a lot"}')
    assert settings(True, '{"training_trace": "off"}') is None


@pytest.mark.parametrize("text", ["5-3", "0-4", "1-"])
def test_windows_have_a_form(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("NPU_DEVICE_TRACE_ITERATIONS", text)
    with pytest.raises(ValueError, match=r"EI0001.*NPU_DEVICE_TRACE_ITERATIONS"):
        settings(True, None)


SLIPS = (
    "{'output':'/t','fp_point':''}",
    '{"output":"/t,"fp_point":""}',
    '{"output":"/t" "fp_point":""',
    "output:/t",
)


@pytest.mark.parametrize("text", SLIPS)
def test_options_with_slips_are_read_with_a_warning(
    text: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert records.read_options(text)["output"] == "/t"
    assert "not a JSON object" in caplog.text


def test_a_long_run_leaves_few_iterations() -> None:
    recorded = [number for number in range(1, 100_001) if is_recorded(number, ())]
    assert recorded[:100] == list(range(1, 101))
    assert len(recorded) < 650 and recorded[-1] > 98_000


HEADER = RankTrace(1, 2, "there", 7, 500.0, 20.0, "", "", "", (), ())


def _schema(sizes: tuple[int, ...], segments: tuple[tuple[int, int], ...]) -> PointSchema:
    gradients = tuple(
        GradientRecord(f"g{number}", "float32", size) for number, size in enumerate(sizes)
    )
    shapes = tuple(f"({size // 4},)" for size in sizes)
    return PointSchema(
        replace(
            HEADER,
            model=records.model_of(gradients, shapes),
            engine="tensorflow",
            group="hccl_world_group",
            gradients=gradients,
            segments=segments,
        )
    )


TWO = _schema((40, 4), ((0, 0), (1, 1)))


def _points(begin: float) -> list[float]:
    """Forward for 1 s, two gradients, both reduced after 0.5 s, updated after 0.25 s more."""
    return _marked([begin, begin + 1, begin + 2, begin + 1.5, begin + 2.5, begin + 2.75])


def _marked(points: list[float]) -> list[float]:
    """Points without an end of the backward pass, and of the own update."""
    return [points[0], records.UNKNOWN, *points[1:-1], records.UNKNOWN, points[-1]]


def record(directory: Path, *steps: tuple[PointSchema, list[float]]) -> RankTrace:
    """What can be read of the steps. Each line is there at once, without an orderly end."""
    recorder = records.TraceFile(1, Settings(directory))
    for schema, points in steps:
        recorder.add(schema, points)
    [found] = read(directory)
    recorder.close()
    return found


def test_points_become_a_record(tmp_path: Path) -> None:
    found = record(tmp_path, (TWO, _points(100.0)), (TWO, _points(103.0)))
    assert replace(found, iterations=()) == TWO.trace
    first, second = found.iterations
    assert (first.fp_start, first.bp_end, first.iteration_end) == (
        100_000_500,
        102_000_500,
        102_750_500,
    )
    assert first.ready == [101_000_500, 102_000_500]
    assert first.allreduce == [[101_000_500, 101_500_500], [102_000_500, 102_500_500]]
    assert (first.previous_end, first.input_wait) == (None, 0.0)
    assert (second.previous_end, second.input_wait, second.step) == (
        first.iteration_end,
        250_000,
        3_000_000,
    )
    assert (second.hidden, second.exposed) == (500_000, 500_000)


def test_the_older_half_goes_at_the_limit(tmp_path: Path) -> None:
    recorder = records.TraceFile(1, Settings(tmp_path, ((1, 1000),), storage_limit=2000))
    for number in range(1, 101):
        recorder.add(TWO, _points(100.0 * number))
        assert (tmp_path / "rank1" / FILE).stat().st_size <= 2000
    [found] = read(tmp_path)
    recorder.close()
    kept = [one.iteration for one in found.iterations]
    assert kept == list(range(kept[0], 101)) and 2 < len(kept) < 20
    assert found.gradients == TWO.trace.gradients


def test_no_iteration_of_an_earlier_cut_is_kept_at_the_limit(tmp_path: Path) -> None:
    recorder = records.TraceFile(1, Settings(tmp_path, ((1, 1000),), storage_limit=2000))
    one_segment = _schema((40, 4), ((0, 1),))
    for number in range(1, 61):
        begin = 100.0 * number
        if number % 9 < 6:
            recorder.add(TWO, _points(begin))
        else:
            points = _marked([begin, begin + 1, begin + 2, begin + 2.5, begin + 2.75])
            recorder.add(one_segment, points)
        for found in read(tmp_path):
            assert {len(each.allreduce) for each in found.iterations} <= {len(found.segments)}
    recorder.close()


def test_a_full_disk_ends_the_trace_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "rank1"
    folder.mkdir()
    (folder / FILE).symlink_to("/dev/full")
    recorder = records.TraceFile(1, Settings(tmp_path))
    for begin in (100.0, 103.0):
        recorder.add(TWO, _points(begin))
    recorder.close()
    assert caplog.text.count("tracing ends here") == 1


def test_a_line_that_was_being_written_is_left_out(tmp_path: Path) -> None:
    record(tmp_path, (TWO, _points(100.0)))
    file = tmp_path / "rank1" / FILE
    file.write_text(file.read_text() + '{"iteration":2,"fp_st')
    assert [one.iteration for one in read(tmp_path)[0].iterations] == [1]
    file.write_text('{"version":1}\nnonsense\n')
    with pytest.raises(ValueError, match=r"iterations\.jsonl, line 2"):
        read(tmp_path)


def test_metrics_give_way_to_gradients(tmp_path: Path) -> None:
    metric = (_schema((4,), ((0, 0),)), _marked([100.0, 100.1, 100.2, 100.3]))
    found = record(tmp_path, *[metric, (TWO, _points(100.0))] * 3)
    assert found.gradients == TWO.trace.gradients
    assert [one.iteration for one in found.iterations] == [1, 2, 3]


def test_another_cut_begins_another_part(tmp_path: Path) -> None:
    other = (_schema((40, 4), ((0, 1),)), _marked([103.0, 104.0, 105.0, 105.5, 105.75]))
    found = record(tmp_path, (TWO, _points(100.0)), other, other)
    assert found.segments == ((0, 1),)
    assert found.iterations[0].allreduce == [[105_000_500, 105_500_500]]
