"""``trace.json``: the iterations of all ranks for Perfetto and Chrome's ``about:tracing``.

The Trace Event Format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU. Events have the
names, categories and arguments of Ascend's step trace.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from npu_device.profiling.records import Iteration, RankTrace

_STEP, _PHASES, _FIRST_SEGMENT = 0, 1, 2
Event = dict[str, Any]


def write_json(traces: Sequence[RankTrace], path: Path) -> None:
    """Write the trace: a process a rank, with a line for the iterations, one for what they consist of, and one for each
    segment, since segments overlap.
    """
    events = [event for trace in traces for event in _events(trace)]
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="utf-8")


def _events(trace: RankTrace) -> Iterator[Event]:
    yield _named("process_name", trace.rank, 0, f"rank {trace.rank} ({trace.host}, process {trace.pid})")
    yield _sorted("process_sort_index", trace.rank, 0, trace.rank)
    lines = ["Step Trace(Model ID:1)", "FP, BP and refresh"]
    lines += [f"Reduce {number}: gradients {first} to {last}" for number, (first, last) in enumerate(trace.segments)]
    for line, name in enumerate(lines):
        yield _named("thread_name", trace.rank, line, name)
        yield _sorted("thread_sort_index", trace.rank, line, line)
    for one in trace.iterations:
        yield from _iteration(trace.rank, one)


def _iteration(rank: int, one: Iteration) -> Iterator[Event]:
    number = one.iteration
    points = {"Iteration ID": number, "FP Start": one.fp_start, "BP End": one.bp_end}
    begin = one.iteration_end - one.time
    whole = {**points, "Iteration End": one.iteration_end, "Iteration Time(us)": one.time}
    yield _span(f"Iteration {number}", "Iteration Time", rank, _STEP, begin, one.iteration_end, whole)
    if one.input_wait is not None:
        # The wait for data is an arrow from the end of the iteration before, as on Ascend.
        wait = {"Iteration ID": number, "Data_aug Bound(us)": one.input_wait}
        arrow = {"cat": "Data_aug Bound", "name": f"Data_aug Bound {number}", "id": f"{rank}.{number}", "pid": rank}
        yield {**arrow, "ph": "s", "tid": _PHASES, "ts": begin, "args": wait}
        yield {**arrow, "ph": "t", "tid": _PHASES, "ts": one.fp_start, "args": wait}
    forward = {**points, "FP_BP Time(us)": one.bp_end - one.fp_start}
    yield _span(f"FP_BP Time {number}", "FP_BP Time", rank, _PHASES, one.fp_start, one.bp_end, forward)
    refresh = {"Iteration ID": number, "BP End": one.bp_end, "Iteration End": one.iteration_end}
    refresh["Iteration Refresh(us)"] = one.iteration_end - one.bp_end
    name = f"Iteration Refresh {number}"
    yield _span(name, "Iteration Refresh", rank, _PHASES, one.bp_end, one.iteration_end, refresh)
    for segment, (start, end) in enumerate(one.allreduce):
        reduce = {"Iteration ID": number, f"Reduce Start {segment}": start, f"Reduce End {segment}": end}
        line = _FIRST_SEGMENT + segment
        yield _span(f"Reduce_{number}_{segment}", "Reduce", rank, line, start, end, reduce)


def _span(name: str, category: str, rank: int, line: int, start: float, end: float, arguments: Event) -> Event:
    event = {"name": name, "cat": category, "ph": "X", "pid": rank, "tid": line}
    return {**event, "ts": start, "dur": end - start, "args": arguments}


def _named(kind: str, rank: int, line: int, name: str) -> Event:
    return {"name": kind, "ph": "M", "pid": rank, "tid": line, "args": {"name": name}}


def _sorted(kind: str, rank: int, line: int, index: int) -> Event:
    return {"name": kind, "ph": "M", "pid": rank, "tid": line, "args": {"sort_index": index}}
