"""``step_trace.csv``: the iterations of all ranks as a table, with the columns that Ascend's profiler writes."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

from npu_device._src.trace.records import Iteration, RankTrace

_COLUMNS = (
    "Device_id",
    "Iteration ID",
    "FP Start(us)",
    "BP End(us)",
    "Iteration End(us)",
    "Iteration Time(us)",
    "FP to BP Time(us)",
    "Iteration Refresh(us)",
    "Data Aug Bound(us)",
    "Model ID",
)
_PAIR = ("Reduce Start(us)", "Reduce Duration(us)")
_MODEL = 1
_NOTHING = "N/A"


def write_csv(traces: Sequence[RankTrace], path: Path) -> None:
    """Write the table: one line for each rank and iteration.

    Args:
        traces: of the ranks; Device_id is the rank.
        path: the file.

    The columns Reduce Start and Reduce Duration come once for each segment, in the order of the segments. Microseconds
    with three decimals; what isn't known is ``N/A``.

    Source: Ascend profiling guide, ``step_trace``.
    """
    pairs = max((len(trace.segments) for trace in traces), default=0)
    with path.open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file)
        table.writerow([*_COLUMNS, *_PAIR * pairs])
        for trace in traces:
            for one in trace.iterations:
                table.writerow(_row(trace.rank, one, pairs))


def _row(rank: int, one: Iteration, pairs: int) -> list[str]:
    times = [
        *(one.fp_start, one.bp_end, one.iteration_end, one.time),
        *(one.bp_end - one.fp_start, one.iteration_end - one.bp_end, one.input_wait),
    ]
    reductions = [text for start, end in one.allreduce for text in (_text(start), _text(end - start))]
    padding = [_NOTHING] * (2 * pairs - len(reductions))
    return [str(rank), str(one.iteration), *map(_text, times), str(_MODEL), *reductions, *padding]


def _text(microseconds: float | None) -> str:
    return _NOTHING if microseconds is None else f"{microseconds:.3f}"
