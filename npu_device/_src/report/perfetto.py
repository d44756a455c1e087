"""Perfetto's file of a trace.

It has the Trace Event Format:
https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU. Events have the names, categories and
arguments of Ascend's step trace. Times are whole microseconds from the first event on; those in the arguments are
absolute. A viewer that calculates in doubles would see larger or finer ones as overlapping, and drop them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from npu_device._src.trace.records import Iteration, RankTrace

# Numbers of the lines of a rank in the viewer ("tid"). Each segment of gradients has one, from the last number on.
_STEP = 0
_PHASES = 1
_FIRST_SEGMENT = 2

Event = dict[str, Any]


def write_json(traces: Sequence[RankTrace], path: Path) -> None:
    """Write the trace: a process per rank, with lines for iterations, for their parts, and for each segment."""
    # The numbers of lines are larger than all ranks: Perfetto takes a thread with the number of its process, here the
    # rank, for the main thread, and thread 0 for the idle thread of all processes.
    events = []
    for trace in traces:
        events += [{**event, "tid": trace.world_size + event["tid"]} for event in _events(trace)]
    timed = [event for event in events if "ts" in event]
    origin = min((event["ts"] for event in timed), default=0)
    for event in timed:
        event["ts"] -= origin
    document = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"Origin(us)": origin}}
    path.write_text(json.dumps(document), encoding="utf-8")


def _events(trace: RankTrace) -> Iterator[Event]:
    """Yield the events of a rank: the names of its lines, then its iterations."""
    process_name = f"rank {trace.rank} ({trace.host}, process {trace.pid})"
    yield _metadata("process_name", trace.rank, _STEP, name=process_name)
    yield _metadata("process_sort_index", trace.rank, _STEP, sort_index=trace.rank)
    names = ["Step Trace(Model ID:1)", "FP, BP and refresh"]
    names += [
        f"Reduce {segment}: gradients {low} to {high}"
        for segment, (low, high) in enumerate(trace.segments)
    ]
    for line, name in enumerate(names):
        yield _metadata("thread_name", trace.rank, line, name=name)
        yield _metadata("thread_sort_index", trace.rank, line, sort_index=line)
    for iteration in trace.iterations:
        yield from _iteration_events(trace.rank, iteration)


def _iteration_events(rank: int, iteration: Iteration) -> Iterator[Event]:
    iteration_id = iteration.iteration
    begin = round(iteration.iteration_start)
    fp_start = round(iteration.fp_start)
    bp_end = round(iteration.bp_end)
    end = round(iteration.iteration_end)
    points = {"FP Start": fp_start, "BP End": bp_end}
    spans = [
        ("Iteration", "Iteration Time", _STEP, begin, end, {**points, "Iteration End": end}),
        ("FP_BP Time", "FP_BP Time", _PHASES, fp_start, bp_end, points),
    ]
    if iteration.update_end is not None:
        spans.append(("Gather", "Gather Time", _PHASES, round(iteration.update_end), end, {}))
    refresh = {"BP End": bp_end, "Iteration End": end}
    spans.append(("Iteration Refresh", "Iteration Refresh", _PHASES, bp_end, end, refresh))
    for name, category, line, start, over, times in spans:
        arguments = {"Iteration ID": iteration_id, **times, f"{category}(us)": over - start}
        yield _span(f"{name} {iteration_id}", category, rank, line, start, over, arguments)
    if iteration.previous_end is not None:
        # The wait for data is an arrow from the beginning of the iteration, as on Ascend. Its ends attach to the spans
        # that begin there.
        wait = {"Iteration ID": iteration_id, "Data_aug Bound(us)": round(iteration.input_wait)}
        arrow = {
            "cat": "Data_aug Bound",
            "name": f"Data_aug Bound {iteration_id}",
            "pid": rank,
            "id": rank << 32 | iteration_id,
        }
        yield {**arrow, "ph": "s", "tid": _STEP, "ts": begin, "args": wait}
        yield {**arrow, "ph": "t", "tid": _PHASES, "ts": fp_start, "args": wait}
    for segment, (start_us, end_us) in enumerate(iteration.allreduce):
        start = round(start_us)
        end = round(end_us)
        reduce = {
            "Iteration ID": iteration_id,
            f"Reduce Start {segment}": start,
            f"Reduce End {segment}": end,
        }
        line = _FIRST_SEGMENT + segment
        yield _span(f"Reduce_{iteration_id}_{segment}", "Reduce", rank, line, start, end, reduce)


def _span(
    name: str, category: str, rank: int, line: int, start: int, end: int, arguments: Event
) -> Event:
    event = {"name": name, "cat": category, "ph": "X", "pid": rank, "tid": line}
    return {**event, "ts": start, "dur": end - start, "args": arguments}


def _metadata(event: str, rank: int, line: int, **arguments: Any) -> Event:
    return {"name": event, "ph": "M", "pid": rank, "tid": line, "args": arguments}
