"""The files made from a recorded trace: Perfetto's file, the report as text and as a page.

Perfetto's file, ``trace.json``, has the Trace Event Format:
https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU. Events have the names, categories and
arguments of Ascend's step trace. Times are whole microseconds from the first event on; those in the arguments are
absolute. A viewer that calculates in doubles would see larger or finer ones as overlapping, and drop them.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from npu_device._src.report.analysis import Analysis, analyse
from npu_device._src.report.summary import summary
from npu_device._src.report.trace_page import page
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
    yield _named("process_name", trace.rank, _STEP, f"rank {trace.rank} ({trace.host}, process {trace.pid})")
    yield _sorted("process_sort_index", trace.rank, _STEP, trace.rank)
    lines = ["Step Trace(Model ID:1)", "FP, BP and refresh"]
    lines += [f"Reduce {number}: gradients {first} to {last}" for number, (first, last) in enumerate(trace.segments)]
    for line, name in enumerate(lines):
        yield _named("thread_name", trace.rank, line, name)
        yield _sorted("thread_sort_index", trace.rank, line, line)
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


def _named(kind: str, rank: int, line: int, name: str) -> Event:
    return {"name": kind, "ph": "M", "pid": rank, "tid": line, "args": {"name": name}}


def _sorted(kind: str, rank: int, line: int, index: int) -> Event:
    return {"name": kind, "ph": "M", "pid": rank, "tid": line, "args": {"sort_index": index}}


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
