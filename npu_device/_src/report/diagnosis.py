"""Diagnoses a trace as one of the three situations of Ascend's tuning guide, and proposes a split to try.

Source: Ascend TF Adapter, "Adjusting the gradient splitting strategy".
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Callable

from npu_device._src.collectives.group import WORLD_GROUP
from npu_device._src.report.figures import RankFigures
from npu_device._src.trace.records import Iteration, RankTrace

_LITTLE = 0.02  # of a step: not worth a change
_MOST = 0.9  # of the bytes
_EQUAL = 4
"""Segments of equal bytes to try: about as fast as the best split that a model finds (docs/benchmarks.md)."""
_NETWORK = 0.2e9
"""Bytes a second between hosts. A core can send at least twice as much on each backend (docs/benchmarks.md), so what is
slower is bound by the network.
"""


@dataclass(frozen=True)
class Diagnosis:
    """The diagnosis and the advice.

    Attributes:
        good: there is nothing to gain.
        situation: a headline, with the guide's advice.
        reasons: the figures that say so.
        call: the call to paste; None when there is none to try.
        expectation: how to find out what it brings, and what else may help.
    """

    good: bool
    situation: str
    reasons: str
    call: str | None
    expectation: str


def diagnose(traces: Sequence[RankTrace], ranks: Sequence[RankFigures]) -> Diagnosis:
    """Return what the split does to the step.

    Args:
        traces: from ``figures.steady``.
        ranks: their figures.
    """
    last = max(ranks, key=lambda rank: rank.busy)
    trace = next(one for one in traces if one.rank == last.rank)
    if last.exposed < _LITTLE * last.step:
        reasons = f"Only {_ms(last.exposed)} of each step is exposed."
        return Diagnosis(True, "Communication is hidden behind backward.", reasons, None, "There is nothing to change.")
    situation, remedy, reasons = _situation(trace, last)
    where = "" if trace.group == WORLD_GROUP else f", group={trace.group!r}"
    call = None if len(trace.segments) == _EQUAL else f"set_split_strategy_by_size({[100 // _EQUAL] * _EQUAL}{where})"
    expectation = "npurun --tune compares splits with the present one." + _send_less(traces, last)
    return Diagnosis(False, f"{situation}: {remedy}.", reasons, call, expectation)


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


def _send_less(traces: Sequence[RankTrace], last: RankFigures) -> str:
    """Return advice to send less if the network between hosts is the limit, and not a core."""
    hosts = len({trace.host for trace in traces})
    wide = any(gradient.dtype in ("float32", "float64") for gradient in traces[0].gradients)
    sent = sum(gradient.bytes for gradient in traces[0].gradients) * 2 * (hosts - 1) / hosts  # by each host
    speed = sent / ((last.hidden + last.exposed) * 1e-6)
    if hosts == 1 or not wide or speed >= _NETWORK:
        return ""
    return (
        f" Each host sends {speed * 8e-9:.1f} Gbit/s, which a core could exceed: the network is the limit. "
        'compression="bf16" halves the bytes, if you don\'t use it yet.'
    )


def _by_start(trace: RankTrace) -> list[int]:
    """Return the numbers of the segments in the order in which they usually start."""

    def start(segment: int) -> float:
        return _median(trace, lambda one: one.allreduce[segment][0] - one.fp_start)

    return sorted(range(len(trace.segments)), key=start)


def _median(trace: RankTrace, value: Callable[[Iteration], float]) -> float:
    return statistics.median(map(value, trace.iterations))


def _ms(microseconds: float) -> str:
    return f"{microseconds / 1e3:.1f} ms"
