"""The report of a trace as text, and a comparison of several traces."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence

from npu_device._src.report.analysis import Analysis, RankFigures
from npu_device._src.trace.records import RankTrace
from npu_device._src.wording import amount, counted


def summary(analysis: Analysis) -> str:
    """Return the report: what was traced, a table of the ranks, whom they wait for, and what to do."""
    diagnosis = analysis.diagnosis
    lines = [*_notes(analysis), "", *_table(analysis.ranks)]
    lines += ["", _waiting(analysis), _spread(analysis)]
    lines += ["", diagnosis.situation, diagnosis.reasons]
    if diagnosis.call is not None:
        lines += ["", "Paste before the first step:", f"    {diagnosis.call}"]
    lines.append(diagnosis.expectation)
    return "\n".join(lines)


def _notes(analysis: Analysis) -> list[str]:
    """Return what was traced, and notes on reading the figures: iterations, clocks, ranks without a trace."""
    # The first trace stands for all: ranks have the same gradients and iterations.
    trace = analysis.traces[0]
    hosts = counted(len({trace.host for trace in analysis.traces}), "host")
    size = amount(trace.bytes)
    segments = counted(len(trace.segments), "segment")
    numbers = [iteration.iteration for iteration in trace.iterations]
    lines = [
        f"{len(trace.gradients)} gradients, {size}, in {segments}; {trace.world_size} ranks on {hosts}, "
        f"group {trace.group!r}, engine {trace.engine}",
        f"medians of {len(numbers)} iterations, from number {numbers[0]} to {numbers[-1]}",
        _clocks(analysis.traces),
    ]
    # Files may be missing, since each rank writes on its own host.
    missing_ranks = sorted(set(range(trace.world_size)) - {trace.rank for trace in analysis.traces})
    if missing_ranks:
        lines.append(
            f"no trace of rank(s) {', '.join(map(str, missing_ranks))}. What to do: bring the directories rank<N> of "
            "all hosts together"
        )
    return lines


def _clocks(traces: Sequence[RankTrace]) -> str:
    if len({trace.host for trace in traces}) == 1:
        return "all ranks read the clock of the same host"
    # A rank whose clock error is unknown has got no answer from rank 0.
    if any(trace.clock_error_us is None for trace in traces):
        return "the clocks of the hosts could not be compared: times of different hosts don't fit together"
    error = max(trace.clock_error_us or 0.0 for trace in traces)
    return f"the clocks of the hosts were compared at the start, to ±{error / 1e3:.2f} ms"


# "hidden" and "exposed" are the reduction during and after compute; "gather" is the exchange of new values.
_NAMES = ("step", "input", "compute", "hidden", "exposed", "update", "gather")


def _table(ranks: Sequence[RankFigures]) -> Iterator[str]:
    """Yield the lines of the table of ranks; only divided updates have a gather."""
    count = len(_NAMES)
    if not any(rank.gather for rank in ranks):
        count -= 1
    yield "ms".ljust(10) + "".join(f"{name:>9}" for name in _NAMES[:count]) + "  host"
    for rank in ranks:
        compute = rank.alone + rank.hidden
        times_us = rank.step, rank.input_wait, compute, rank.hidden, rank.exposed, rank.update
        cells = "".join(f"{time_us / 1e3:9.1f}" for time_us in (*times_us, rank.gather)[:count])
        yield f"rank {rank.rank:<5}{cells}  {rank.host}"


def _waiting(analysis: Analysis) -> str:
    slowest = analysis.slowest
    if slowest is None:
        return "no rank is slower than the others"
    waiting = "the other rank waits"
    if len(analysis.ranks) > 2:
        waiting = "the others wait"
    lag = f"it is {slowest.late / 1e3:.1f} ms later, in {slowest.cause}"
    return f"{waiting} for rank {slowest.rank} on host {slowest.host}: {lag}"


def _spread(analysis: Analysis) -> str:
    times = sorted(analysis.times)
    tenth = times[len(times) // 10]
    ninetieth = times[-1 - len(times) // 10]
    return (
        f"on its slowest rank, a step takes {statistics.median(times) / 1e3:.1f} ms; 10 % take less than "
        f"{tenth / 1e3:.1f} ms, 10 % more than {ninetieth / 1e3:.1f} ms, the longest {times[-1] / 1e3:.1f} ms"
    )


def compared(analyses: Mapping[str, Analysis]) -> str:
    """Return a table of several traces, by name, with the medians on the rank that the others wait for."""
    width = max(map(len, analyses))
    lines = [f"{'trace':{width}}{'segments':>10}{'exposed, ms':>13}{'ms per step':>13}"]
    for name, analysis in analyses.items():
        busiest = analysis.busiest
        segments = len(analysis.traces[0].segments)
        lines.append(
            f"{name:{width}}{segments:>10}{busiest.exposed / 1e3:>13.1f}{busiest.step / 1e3:>13.1f}"
        )
    return "\n".join(lines)
