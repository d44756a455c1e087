"""The report as text, and the comparison of several."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from npu_device._src.report.analysis import Analysis, RankFigures, amount
from npu_device._src.trace.records import RankTrace


def summary(found: Analysis) -> str:
    lines = [
        _headline(found),
        *_notes(found),
        "",
        _HEAD,
        *map(_row, found.ranks),
        "",
        _waiting(found),
        _spread(found),
        "",
    ]
    diagnosis = found.diagnosis
    lines += [diagnosis.situation, diagnosis.reasons]
    if diagnosis.call is not None:
        lines += ["", "Paste before the first step:", f"    {diagnosis.call}"]
    lines.append(diagnosis.expectation)
    return "\n".join(lines)


def _headline(found: Analysis) -> str:
    first = found.traces[0]
    size = sum(gradient.bytes for gradient in first.gradients)
    segments = f"{len(first.segments)} segment{'s' if len(first.segments) > 1 else ''}"
    hosts = len({trace.host for trace in found.traces})
    return (
        f"{len(first.gradients)} gradients, {amount(size)}, in {segments}; {first.world_size} ranks on {hosts} "
        f"host{'s' if hosts > 1 else ''}, group {first.group!r}, backend {first.backend}"
    )


def _notes(found: Analysis) -> list[str]:
    """Return notes on reading the figures: iterations, clocks, ranks without a trace."""
    numbers = [one.iteration for one in found.traces[0].iterations]
    lines = [f"medians of {len(numbers)} iterations, from number {numbers[0]} to {numbers[-1]}"]
    lines.append(_clocks(found.traces))
    missing = sorted(set(range(found.traces[0].world_size)) - {trace.rank for trace in found.traces})
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
