"""A trace in figures, which rank the others wait for, and what the split does to the step. Imports no TensorFlow.

Figures are medians, in microseconds. Source: Ascend TF Adapter, "Adjusting the gradient splitting strategy".
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Callable

from npu_device._src.collectives.group import WORLD_GROUP
from npu_device._src.trace.records import Iteration, RankTrace

WARM_UP = 2
"""Recorded iterations at the beginning that don't count: they compile, and fill caches."""

_EVEN = 0.02  # a rank within this part of a step of the others is as fast as they are


@dataclass(frozen=True)
class RankFigures:
    rank: int
    host: str
    step: float  # the whole step, from the end of the one before it
    input_wait: float  # before forward begins
    alone: float  # forward and backward while nothing is reduced
    hidden: float  # forward and backward while segments are reduced
    exposed: float  # reduction after backward
    update: float  # what remains: the optimizer

    @property
    def busy(self) -> float:
        """Return the time until the rank has nothing left to do but wait for the others."""
        return self.input_wait + self.alone + self.hidden


@dataclass(frozen=True)
class Slowest:
    """The rank that the others wait for: how much later it is than their median, and the part in which it is."""

    rank: int
    host: str
    late: float
    cause: str


def steady(traces: Sequence[RankTrace]) -> list[RankTrace]:
    """Return the traces with the iterations that every rank has, without the first ones; ValueError if none."""
    if len({(trace.model, trace.segments) for trace in traces}) > 1:
        lines = "\n".join(f"rank {trace.rank}: model {trace.model}, segments {trace.segments}" for trace in traces)
        raise ValueError(f"the ranks reduced different segments:\n{lines}\nLikely cause: traces of several runs.")
    by_number = [{one.iteration: one for one in trace.iterations} for trace in traces]
    common = sorted(set.intersection(*map(set, by_number)))
    if not common:
        counts = "\n".join(f"rank {trace.rank}: {len(trace.iterations)} iterations" for trace in traces)
        raise ValueError(f"no iteration was recorded on every rank:\n{counts}")
    kept = common[WARM_UP:] or common[-1:]
    pairs = zip(traces, by_number)
    return [replace(trace, iterations=tuple(iterations[number] for number in kept)) for trace, iterations in pairs]


def figures(trace: RankTrace) -> RankFigures:
    ones = trace.iterations
    return RankFigures(
        rank=trace.rank,
        host=trace.host,
        step=statistics.median(one.time for one in ones),
        input_wait=statistics.median(one.input_wait or 0.0 for one in ones),
        alone=statistics.median(one.bp_end - one.fp_start - one.hidden for one in ones),
        hidden=statistics.median(one.hidden for one in ones),
        exposed=statistics.median(one.exposed for one in ones),
        update=statistics.median(one.iteration_end - max(one.bp_end, one.last_reduced) for one in ones),
    )


def slowest(ranks: Sequence[RankFigures]) -> Slowest | None:
    last = max(ranks, key=lambda rank: rank.busy)
    others = [rank for rank in ranks if rank is not last]
    if not others:
        return None
    late = last.busy - statistics.median(rank.busy for rank in others)
    if late < _EVEN * last.step:
        return None
    waits = last.input_wait - statistics.median(rank.input_wait for rank in others)
    cause = "waiting for input" if waits > late / 2 else "forward and backward"
    return Slowest(last.rank, last.host, late, cause)


def median_iteration(traces: Sequence[RankTrace]) -> int:
    times = [[one.time for one in trace.iterations] for trace in traces]
    longest = [max(each) for each in zip(*times)]
    ordered = sorted(range(len(longest)), key=longest.__getitem__)
    return traces[0].iterations[ordered[len(ordered) // 2]].iteration


def amount(size: float) -> str:
    """Return a number of bytes with its unit.

    >>> amount(102_228_128), amount(196)
    ('102.2 MB', '0.2 kB')
    """
    return f"{size / 1e6:.1f} MB" if size >= 1e6 else f"{size / 1e3:.1f} kB"


_LITTLE = 0.02  # of a step: not worth a change
_MOST = 0.9  # of the bytes
_EQUAL = 4
"""Segments of equal bytes to try: about as fast as the best split that a model finds (docs/notes.md)."""
_NETWORK = 0.2e9
"""Bytes a second between hosts. A core can send at least twice as much on each backend (docs/benchmarks.md), so what is
slower is bound by the network.
"""


@dataclass(frozen=True)
class Diagnosis:
    situation: str
    reasons: str  # the figures that say so
    call: str | None  # the call to paste; None when there is none to try
    expectation: str  # how to find out what it brings, and what else may help


def diagnose(traces: Sequence[RankTrace], ranks: Sequence[RankFigures]) -> Diagnosis:
    last = max(ranks, key=lambda rank: rank.busy)
    trace = next(one for one in traces if one.rank == last.rank)
    if last.exposed < _LITTLE * last.step:
        reasons = f"Only {_ms(last.exposed)} of each step is exposed."
        return Diagnosis("Communication is hidden behind backward.", reasons, None, "There is nothing to change.")
    situation, remedy, reasons = _situation(trace, last)
    where = "" if trace.group == WORLD_GROUP else f", group={trace.group!r}"
    call = None if len(trace.segments) == _EQUAL else f"set_split_strategy_by_size({[100 // _EQUAL] * _EQUAL}{where})"
    expectation = "npurun trace A B compares the steps of two traces." + _send_less(traces, last)
    return Diagnosis(f"{situation}: {remedy}.", reasons, call, expectation)


def _situation(trace: RankTrace, rank: RankFigures) -> tuple[str, str, str]:
    """Return the situation, what the guide advises in it, and the figures that say so."""

    def starts(segment: int) -> float:
        return _median(trace, lambda one: one.allreduce[segment][0] - one.fp_start)

    order = sorted(range(len(trace.segments)), key=starts)
    share = [trace.bytes_of(segment) / max(1, sum(one.bytes for one in trace.gradients)) for segment in order]
    before = order[:-1]
    slack = _median(trace, lambda one: one.bp_end - max((one.allreduce[i][1] for i in before), default=one.bp_end))
    backward = rank.alone + rank.hidden
    hang = f"the reduction ends {_ms(rank.exposed)} after the backward pass, {rank.exposed / rank.step:.0%} of a step"
    if rank.hidden + rank.exposed > backward:
        hang += f". It takes {_ms(rank.hidden + rank.exposed)}, longer than the backward pass: no split can hide it all"
    if max(share) >= _MOST:
        which = f"One of {len(order)} segments has {max(share):.0%}" if before else "The only segment has all"
        situation = "One segment has most of the bytes and ends after the backward pass"
        return situation, "add segments", f"{which} of the bytes; {hang}."
    first = (
        f"The backward pass ends {_ms(backward)} after the start of the step. The first segment ({share[0]:.0%} of the "
        f"bytes) starts after {_ms(starts(order[0]))}"
    )
    if slack < 0:
        return (
            "The first reductions start late and end after the backward pass",
            "move the cut forward",
            f"{first}; all but the last segment end {_ms(-slack)} after the backward pass; {hang}.",
        )
    return (
        "The first reduction starts early and the last one is long",
        "move the cut back",
        f"{first}; all but the last segment end {_ms(slack)} before the backward pass, and the last one "
        f"({share[-1]:.0%}) after it; {hang}.",
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
        f" Each host sends {speed * 8e-9:.1f} Gbit/s, less than a core can send: the network is the limit. "
        'compression="bf16" halves the bytes, if you don\'t use it yet.'
    )


def _median(trace: RankTrace, value: Callable[[Iteration], float]) -> float:
    return statistics.median(map(value, trace.iterations))


def _ms(microseconds: float) -> str:
    return f"{microseconds / 1e3:.1f} ms"


@dataclass(frozen=True)
class Analysis:
    traces: tuple[RankTrace, ...]  # of all ranks, with the iterations that count
    ranks: tuple[RankFigures, ...]  # where the time of each rank goes
    slowest: Slowest | None  # the rank that the others wait for
    shown: int  # number of the iteration to draw
    diagnosis: Diagnosis  # what the split does, and what to do


def analyse(traces: Sequence[RankTrace]) -> Analysis:
    kept = steady(traces)
    ranks = [figures(trace) for trace in kept]
    return Analysis(tuple(kept), tuple(ranks), slowest(ranks), median_iteration(kept), diagnose(kept, ranks))
