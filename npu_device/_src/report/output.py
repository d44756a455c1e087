"""The files made from a recorded trace: Perfetto's file, the report as text, and a page with the picture of a step.

Perfetto's file, ``trace.json``, has the Trace Event Format:
https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU. Events have the names, categories and
arguments of Ascend's step trace. Times are whole microseconds from the first event on; those in the arguments are
absolute. A viewer that calculates in doubles would see larger or finer ones as overlapping, and drop them.
"""

from __future__ import annotations

import json
import logging
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from npu_device._src.report.analysis import Analysis, RankFigures, amount, analyse
from npu_device._src.trace.records import Iteration, RankTrace, read

_STEP, _PHASES, _FIRST_SEGMENT = 0, 1, 2
Event = dict[str, Any]


def write_json(traces: Sequence[RankTrace], path: Path) -> None:
    """Write the trace: a process per rank, with lines for iterations, for their parts, and for each segment."""
    # The numbers of lines follow those of the ranks. Perfetto takes a thread with its process's number for the main
    # thread, and 0 for the idle thread of all processes.
    events = [{**event, "tid": trace.world_size + event["tid"]} for trace in traces for event in _events(trace)]
    timed = [event for event in events if "ts" in event]
    origin = min((event["ts"] for event in timed), default=0)
    for event in timed:
        event["ts"] -= origin
    document = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"Origin(us)": origin}}
    path.write_text(json.dumps(document), encoding="utf-8")


def _events(trace: RankTrace) -> Iterator[Event]:
    yield _about("process_name", trace.rank, _STEP, name=f"rank {trace.rank} ({trace.host}, process {trace.pid})")
    yield _about("process_sort_index", trace.rank, _STEP, sort_index=trace.rank)
    lines = ["Step Trace(Model ID:1)", "FP, BP and refresh"]
    lines += [f"Reduce {number}: gradients {first} to {last}" for number, (first, last) in enumerate(trace.segments)]
    for line, name in enumerate(lines):
        yield _about("thread_name", trace.rank, line, name=name)
        yield _about("thread_sort_index", trace.rank, line, sort_index=line)
    for one in trace.iterations:
        yield from _iteration(trace.rank, one)


def _iteration(rank: int, one: Iteration) -> Iterator[Event]:
    number = one.iteration
    begin, fp_start, bp_end, end = map(round, (one.begin, one.fp_start, one.bp_end, one.iteration_end))
    points = {"Iteration ID": number, "FP Start": fp_start, "BP End": bp_end}
    whole = {**points, "Iteration End": end, "Iteration Time(us)": end - begin}
    yield _span(f"Iteration {number}", "Iteration Time", rank, _STEP, begin, end, whole)
    forward = {**points, "FP_BP Time(us)": bp_end - fp_start}
    yield _span(f"FP_BP Time {number}", "FP_BP Time", rank, _PHASES, fp_start, bp_end, forward)
    if one.input_wait is not None:
        # The wait for data is an arrow from the beginning of the iteration, as on Ascend. Its ends attach to the spans
        # that begin there.
        wait = {"Iteration ID": number, "Data_aug Bound(us)": round(one.input_wait)}
        arrow = {"cat": "Data_aug Bound", "name": f"Data_aug Bound {number}", "pid": rank, "id": rank << 32 | number}
        yield {**arrow, "ph": "s", "tid": _STEP, "ts": begin, "args": wait}
        yield {**arrow, "ph": "t", "tid": _PHASES, "ts": fp_start, "args": wait}
    refresh = {"Iteration ID": number, "BP End": bp_end, "Iteration End": end, "Iteration Refresh(us)": end - bp_end}
    yield _span(f"Iteration Refresh {number}", "Iteration Refresh", rank, _PHASES, bp_end, end, refresh)
    for segment, interval in enumerate(one.allreduce):
        start, over = map(round, interval)
        reduce = {"Iteration ID": number, f"Reduce Start {segment}": start, f"Reduce End {segment}": over}
        yield _span(f"Reduce_{number}_{segment}", "Reduce", rank, _FIRST_SEGMENT + segment, start, over, reduce)


def _span(name: str, category: str, rank: int, line: int, start: int, end: int, arguments: Event) -> Event:
    event = {"name": name, "cat": category, "ph": "X", "pid": rank, "tid": line}
    return {**event, "ts": start, "dur": end - start, "args": arguments}


def _about(kind: str, rank: int, line: int, **arguments: Any) -> Event:
    return {"name": kind, "ph": "M", "pid": rank, "tid": line, "args": arguments}


PERFETTO, TEXT, PAGE = "trace.json", "report.txt", "report.html"

_log = logging.getLogger("npu_device")


def write_all(directory: Path) -> Analysis:
    """Write all files into the directory of a trace, and return what they say; ValueError if there is none."""
    traces = read(directory)
    if not traces:
        raise ValueError("there is no trace in the directory")
    write_json(traces, directory / PERFETTO)
    found = analyse(traces)
    text = summary(found)
    (directory / TEXT).write_text(text + "\n", encoding="utf-8")
    (directory / PAGE).write_text(page(found, text), encoding="utf-8")
    return found


def write_report(directory: Path) -> None:
    """Run ``write_all`` at the end of a job; an error in the report does not fail the job."""
    try:
        write_all(directory)
        _log.info("the report of the trace is %s", directory / PAGE)
    except (OSError, ValueError) as error:
        _log.warning("the trace in %s has no report: %s", directory, error)


def summary(found: Analysis) -> str:
    diagnosis = found.diagnosis
    lines = [*_notes(found), "", _HEAD, *map(_row, found.ranks), "", _waiting(found), _spread(found), ""]
    lines += [diagnosis.situation, diagnosis.reasons]
    if diagnosis.call is not None:
        lines += ["", "Paste before the first step:", f"    {diagnosis.call}"]
    lines.append(diagnosis.expectation)
    return "\n".join(lines)


def _notes(found: Analysis) -> list[str]:
    """Return what was traced, and notes on reading the figures: iterations, clocks, ranks without a trace."""
    first, hosts = found.traces[0], len({trace.host for trace in found.traces})
    size = amount(sum(gradient.bytes for gradient in first.gradients))
    segments = f"{len(first.segments)} segment{'s' if len(first.segments) > 1 else ''}"
    numbers = [one.iteration for one in first.iterations]
    lines = [
        f"{len(first.gradients)} gradients, {size}, in {segments}; {first.world_size} ranks on {hosts} "
        f"host{'s' if hosts > 1 else ''}, group {first.group!r}, backend {first.backend}",
        f"medians of {len(numbers)} iterations, from number {numbers[0]} to {numbers[-1]}",
        _clocks(found.traces),
    ]
    missing = sorted(set(range(first.world_size)) - {trace.rank for trace in found.traces})
    if missing:
        lines.append(
            f"no trace of rank(s) {', '.join(map(str, missing))}. What to do: bring the directories rank<N> of all "
            "hosts together"
        )
    return lines


def _clocks(traces: Sequence[RankTrace]) -> str:
    if len({trace.host for trace in traces}) == 1:
        return "all ranks read the clock of the same host"
    if any(trace.clock_error_us is None for trace in traces):
        return "the clocks of the hosts could not be compared: times of different hosts don't fit together"
    error = max(trace.clock_error_us or 0.0 for trace in traces)
    return f"the clocks of the hosts were compared at the start, to ±{error / 1e3:.2f} ms"


# Hidden and exposed are the reduction during and after compute.
_HEAD = "ms".ljust(10) + "".join(f"{name:>9}" for name in ("step", "input", "compute", "hidden", "exposed", "update"))
_HEAD += "  host"


def _row(rank: RankFigures) -> str:
    parts = rank.step, rank.input_wait, rank.alone + rank.hidden, rank.hidden, rank.exposed, rank.update
    return f"rank {rank.rank:<5}" + "".join(f"{part / 1e3:9.1f}" for part in parts) + f"  {rank.host}"


def _waiting(found: Analysis) -> str:
    last = found.slowest
    if last is None:
        return "no rank is slower than the others"
    others = "the others wait" if len(found.ranks) > 2 else "the other rank waits"
    return f"{others} for rank {last.rank} on host {last.host}: it is {last.late / 1e3:.1f} ms later, in {last.cause}"


def _spread(found: Analysis) -> str:
    times = sorted(max(each) for each in zip(*([one.time for one in trace.iterations] for trace in found.traces)))
    tenth, ninetieth = times[len(times) // 10], times[-1 - len(times) // 10]
    return (
        f"on its slowest rank, a step takes {statistics.median(times) / 1e3:.1f} ms; 10 % take less than "
        f"{tenth / 1e3:.1f} ms, 10 % more than {ninetieth / 1e3:.1f} ms, the longest {times[-1] / 1e3:.1f} ms"
    )


def compared(found: Mapping[str, Analysis]) -> str:
    """Return a table of several traces, by name, with the medians on the rank that the others wait for."""
    width = max(map(len, found))
    lines = [f"{'trace':{width}}{'segments':>10}{'exposed, ms':>13}{'ms per step':>13}"]
    for name, each in found.items():
        last = max(each.ranks, key=lambda rank: rank.busy)
        segments = len(each.traces[0].segments)
        lines.append(f"{name:{width}}{segments:>10}{last.exposed / 1e3:>13.1f}{last.step / 1e3:>13.1f}")
    return "\n".join(lines)


COLOURS = {
    "input wait": "#cbd5e1",
    "forward": "#a5c8f5",
    "backward": "#4f86d9",
    "hidden reduction": "#f2a93b",
    "exposed reduction": "#d64545",
    "update": "#6fbf8b",
}
_ROW, _LANE, _LANES, _TICKS = 26, 14, 8, 8
_SHOWN = 16  # ranks
_STYLE = """
body { max-width: 1160px; margin: 0 auto; padding: 20px; color: #1f2733; font: 15px/1.5 system-ui, sans-serif; }
pre { overflow-x: auto; font-size: 13px; }
.step { position: relative; margin-left: 130px; padding-top: 22px; font-size: 12px; }
.step * { position: absolute; }
.rank, .rank small { position: relative; display: block; }
.rank { margin-bottom: 18px; }
.rank > b { left: -130px; width: 120px; overflow: hidden; white-space: nowrap; line-height: 1.2; }
.rank > small { font-weight: normal; }
.rank > i { height: 12px; border-radius: 2px; }
.rank > .end { top: -4px; bottom: 0; width: 0; border-left: 1.2px dashed #1f2733; border-radius: 0; height: auto; }
.tick { top: 0; bottom: 0; border-left: 1px solid #e7ebf1; color: #5b6675; padding-left: 3px; white-space: nowrap; }
.legend span { margin-right: 18px; white-space: nowrap; }
.legend i { display: inline-block; width: 12px; height: 12px; border-radius: 3px; margin-right: 6px; }
"""


def page(found: Analysis, text: str) -> str:
    """Return the page: the picture of the iteration of median length on all ranks, or the first ones and the slowest,
    and the text of the report.
    """
    last = found.slowest.rank if found.slowest is not None else 0
    first = [trace.rank for trace in found.traces if trace.rank != last][: _SHOWN - 1]
    shown = [trace for trace in found.traces if trace.rank in (*first, last)]
    ones = [next(one for one in trace.iterations if one.iteration == found.shown) for trace in shown]
    begin = min(one.begin for one in ones)
    whole = max(max(one.iteration_end for one in ones) - begin, 1e-3)
    ranks = "".join(_rank(trace, one, begin, whole) for trace, one in zip(shown, ones))
    marks = (f'<span><i style="background:{colour}"></i>{escape(kind)}</span>' for kind, colour in COLOURS.items())
    more = f" {len(found.traces) - len(shown)} further ranks are not drawn." if len(found.traces) > len(shown) else ""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>Iteration trace</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{_STYLE}</style></head>\n'
        f"<body><h1>Iteration {found.shown}, of median length</h1>"
        f'<div class="step">{_ticks(whole / 1e3)}{ranks}</div><p class="legend">{"".join(marks)}</p>'
        "<p>The dashed line is the end of backward. White marks show when each gradient was ready. Forward is drawn up "
        f"to the first of them. Pause the pointer on a bar for its figures.{more}</p>\n"
        f"<pre>{escape(text)}</pre></body></html>\n"
    )


def _rank(trace: RankTrace, one: Iteration, begin: float, whole: float) -> str:
    """Draw a rank: its phases, and below them its reductions, each in the first lane that is free."""

    def bar(kind: str, start: float, end: float, top: float, more: str) -> None:
        left, width = 100 * (start - begin) / whole, 100 * max(0.0, end - start) / whole
        place = f"left:{left:.2f}%;width:{width:.2f}%;top:{top}px;background:{COLOURS[kind]}" + more
        parts.append(f'<i style="{place}" title="{text}"></i>')

    parts = [f"<b>rank {trace.rank}<small>{escape(trace.host)}</small></b>"]
    first = min(max(one.fp_start, min(one.ready)), one.bp_end)
    for kind, start, end in (
        ("input wait", one.begin, one.fp_start),
        ("forward", one.fp_start, first),
        ("backward", first, one.bp_end),
        ("update", max(one.bp_end, one.last_reduced), one.iteration_end),
    ):
        text = f"rank {trace.rank}, {kind}: {(end - start) / 1e3:.2f} ms"
        bar(kind, start, end, 0, ";height:22px")
    places = (f"left:{100 * (ready - begin) / whole:.2f}%" for ready in one.ready)
    parts += (f'<i style="{place};top:16px;width:1px;height:6px;background:#ffffffbf"></i>' for place in places)
    lanes: list[float] = []
    for segment in sorted(range(len(one.allreduce)), key=lambda segment: one.allreduce[segment]):
        start, end = one.allreduce[segment]
        lane = min(next((lane for lane, free in enumerate(lanes) if free <= start), len(lanes)), _LANES - 1)
        lanes[lane : lane + 1] = [end]
        low, high = trace.segments[segment]
        text = f"rank {trace.rank}, segment {segment}: gradients {low} to {high}, {amount(trace.bytes_of(segment))}, "
        text += f"{(end - start) / 1e3:.2f} ms"
        if start < one.bp_end:
            bar("hidden reduction", start, min(end, one.bp_end), _ROW + lane * _LANE, "")
        if end > one.bp_end:
            bar("exposed reduction", max(start, one.bp_end), end, _ROW + lane * _LANE, "")
    parts.append(f'<i class="end" style="left:{100 * (one.bp_end - begin) / whole:.2f}%"></i>')
    return f'<div class="rank" style="height:{_ROW + len(lanes) * _LANE}px">{"".join(parts)}</div>'


def _ticks(longest: float) -> str:
    """Return lines at round numbers of milliseconds."""
    rough = longest / _TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    ticks = (round(step * number, 9) for number in range(int(longest / step) + 1))
    return "".join(f'<div class="tick" style="left:{100 * tick / longest:.2f}%">{tick:g} ms</div>' for tick in ticks)
