"""Diagnoses a trace as one of the three situations of Ascend's tuning guide, and proposes the split to try next.

Source: Ascend TF Adapter, "Adjusting the gradient splitting strategy".
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Callable

from npu_device._src.collectives.group import WORLD_GROUP
from npu_device._src.gradients.split_strategy import firsts_and_lasts
from npu_device._src.report.figures import RankFigures
from npu_device._src.trace.records import Iteration, RankTrace
from npu_device._src.tuning.cost_model import CostModel, fit, measured_in
from npu_device._src.tuning.messages import line_to_paste
from npu_device._src.tuning.planner import best_plan, predict
from npu_device._src.tuning.traced_run import summarise

_LITTLE = 0.02  # of a step: not worth a change
_MOST = 0.9  # of the bytes
_ASSUMED_ALPHA = 1e-3
_NETWORK = 0.2e9
"""Bytes a second between hosts. A core can send at least twice as much on each backend (docs/benchmarks.md), so what is
slower is bound by the network.
"""


@dataclass(frozen=True)
class Diagnosis:
    """The diagnosis and the advice.

    Attributes:
        good: there is nothing to gain.
        situation: a headline, with the guide's advice if a better split is to be expected.
        reasons: the figures that say so.
        call: the call to paste; None when no better split is to be expected.
        expectation: what the call is expected to bring, or why there is none.
    """

    good: bool
    situation: str
    reasons: str
    call: str | None
    expectation: str


def diagnose(traces: Sequence[RankTrace], ranks: Sequence[RankFigures], directory: Path) -> Diagnosis:
    """Return what the split does to the step.

    Args:
        traces: from ``figures.steady``.
        ranks: their figures.
        directory: of the trace; it may contain a measurement of the collectives.
    """
    last = max(ranks, key=lambda rank: rank.busy)
    trace = next(one for one in traces if one.rank == last.rank)
    if last.exposed < _LITTLE * last.step:
        reasons = f"Only {_ms(last.exposed)} of each step is exposed."
        return Diagnosis(True, "Communication is hidden behind backward.", reasons, None, "There is nothing to change.")
    situation, remedy, reasons = _situation(trace, last)
    call, expectation = _advice(traces, directory)
    return Diagnosis(False, f"{situation}: {remedy}." if call else f"{situation}.", reasons, call, expectation)


def _situation(trace: RankTrace, rank: RankFigures) -> tuple[str, str, str]:
    """Return the situation, what the guide advises in it, and the figures that say so."""
    order = _by_start(trace)
    share = [trace.bytes_of(segment) / max(1, sum(one.bytes for one in trace.gradients)) for segment in order]
    before = order[:-1]
    start = _median(trace, lambda one: one.allreduce[order[0]][0] - one.fp_start)
    slack = _median(trace, lambda one: one.bp_end - max((one.allreduce[i][1] for i in before), default=one.bp_end))
    backward = rank.alone + rank.hidden
    hang = f"reduction goes on for {_ms(rank.exposed)} after backward, {rank.exposed / rank.step:.0%} of a step"
    if rank.hidden + rank.exposed > backward:
        hang += f". It takes {_ms(rank.hidden + rank.exposed)} in all, longer than backward: no split can hide it all"
    if max(share) >= _MOST:
        which = f"One of {len(order)} segments has {max(share):.0%}" if before else "The only segment has all"
        situation = "One segment has most of the bytes and ends after backward"
        return situation, "add segments", f"{which} of the bytes; {hang}."
    first = (
        f"Backward ends {_ms(backward)} after the start of forward. The first segment ({share[0]:.0%} of the bytes) "
        f"starts after {_ms(start)}"
    )
    if slack < 0:
        return (
            "The first reductions start late and outlast backward",
            "move the cut forward",
            f"{first}; all but the last segment are over {_ms(-slack)} after backward; {hang}.",
        )
    return (
        "The first reduction starts early and the last one is long",
        "move the cut back",
        f"{first}; all but the last segment are over {_ms(slack)} before backward ends, and the last one "
        f"({share[-1]:.0%}) ends after it; {hang}.",
    )


def _advice(traces: Sequence[RankTrace], directory: Path) -> tuple[str | None, str]:
    """Return the call to make, and its expected gain."""
    check = "npurun --tune measures the collectives, and tries the splits that it finds."
    try:
        found = summarise(traces)
    except ValueError as error:
        return None, f"No split is proposed: {error}"
    cost, source = _cost(traces, directory)
    backward = found.without_collectives(cost).backward
    plan, now = best_plan(backward, cost), predict(backward, cost, found.ends)
    gain, check = now.finish - plan.finish, check + _send_less(traces, cost)
    if gain < _LITTLE * found.median:
        return None, f"According to {source}, no other split is expected to be faster. {check}"
    text = f"According to {source}, it saves {_ms(gain * 1e6)} of a step's {_ms(found.median * 1e6)}. {check}"
    return _call(traces[0], backward.sizes, plan.ends), text


def _send_less(traces: Sequence[RankTrace], cost: CostModel) -> str:
    """Return advice to send less if the network between hosts is the limit, and not a core."""
    hosts = len({trace.host for trace in traces})
    wide = any(gradient.dtype in ("float32", "float64") for gradient in traces[0].gradients)
    sent = 2 * (hosts - 1) / hosts  # bytes that each host sends for a byte of gradients
    if hosts == 1 or not wide or sent >= _NETWORK * cost.beta:
        return ""
    return (
        f" Each host sends {sent / cost.beta * 8e-9:.1f} Gbit/s, which a core could exceed: the network is the limit. "
        'compression="bf16" halves the bytes, if you don\'t use it yet.'
    )


def _cost(traces: Sequence[RankTrace], directory: Path) -> tuple[CostModel, str]:
    known = measured_in(directory)
    if known is not None:
        return known, "the measured collectives"
    samples = _samples(traces)
    samples.pop(0, None)
    if len(samples) > 1:
        cost = fit(samples)
        return CostModel(cost.alpha, cost.beta, busy=cost.alpha), "the segments' times in this trace"
    [(size, times)] = samples.items()
    beta = max(0.0, statistics.median(times) - _ASSUMED_ALPHA) / size
    fixed = _ms(_ASSUMED_ALPHA * 1e6)
    source = f"the gradients' time in this trace (of which {fixed} are assumed to be independent of size)"
    return CostModel(_ASSUMED_ALPHA, beta, busy=_ASSUMED_ALPHA), source


def _samples(traces: Sequence[RankTrace]) -> dict[int, list[float]]:
    """Return, by bytes, the seconds that segments took once every rank had them and the network was theirs alone.

    In shared memory and through MPI, a segment begins when the one before it is over. Elsewhere, segments in flight at
    the same time share the network, and only their total counts.
    """
    queued = traces[0].backend != "tensorflow"
    samples: dict[int, list[float]] = {}
    for ones in zip(*(trace.iterations for trace in traces)):
        size, begun, over = 0, 0.0, 0.0
        for segment in _by_start(traces[0]):
            start, end = (max(one.allreduce[segment][point] for one in ones) for point in (0, 1))
            if size and (queued or start >= over):
                samples.setdefault(size, []).append(max(1.0, over - begun) * 1e-6)
                size = 0
            begun = begun if size else max(over, start)
            size += traces[0].bytes_of(segment)
            over = end if queued else max(over, end)
        samples.setdefault(size, []).append(max(1.0, over - begun) * 1e-6)
    return samples


def _call(trace: RankTrace, sizes: Sequence[int], ends: Sequence[int]) -> str:
    if len({gradient.dtype for gradient in trace.gradients if not gradient.dtype.startswith("sparse")}) == 1:
        return line_to_paste(ends, trace.group)
    # Each dtype numbers its gradients separately, and one list of indices fits only one dtype.
    shares = [sum(sizes[first : last + 1]) / sum(sizes) for first, last in firsts_and_lasts(ends)]
    percentages = [max(1, round(100 * share)) for share in shares]
    percentages[percentages.index(max(percentages))] += 100 - sum(percentages)
    where = "" if trace.group == WORLD_GROUP else f", group={trace.group!r}"
    return f"set_split_strategy_by_size({percentages}{where})"


def _by_start(trace: RankTrace) -> list[int]:
    """Return the numbers of the segments in the order in which they usually start."""

    def start(segment: int) -> float:
        return _median(trace, lambda one: one.allreduce[segment][0] - one.fp_start)

    return sorted(range(len(trace.segments)), key=start)


def _median(trace: RankTrace, value: Callable[[Iteration], float]) -> float:
    return statistics.median(map(value, trace.iterations))


def _ms(microseconds: float) -> str:
    return f"{microseconds / 1e3:.1f} ms"
