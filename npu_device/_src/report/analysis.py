"""A trace in figures, which rank the others wait for, and what the split does to the step. Imports no TensorFlow.

Figures are medians, in microseconds. Source: Ascend TF Adapter, "Adjusting the gradient splitting strategy".
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from operator import attrgetter
from typing import Callable

from npu_device._src.collectives.group import WORLD_GROUP
from npu_device._src.trace.records import Iteration, RankTrace

WARM_UP = 2
"""Recorded iterations at the beginning that don't count: they compile, and fill caches."""

_EVEN = 0.02  # fraction of a step: a rank that is not later than this is as fast as the others


@dataclass(frozen=True)
class RankFigures:
    rank: int
    host: str
    step: float  # the whole step, from the end of the one before it
    input_wait: float  # wait for input, before forward begins
    alone: float  # forward and backward while nothing is reduced
    hidden: float  # forward and backward while segments are reduced
    exposed: float  # reduction after backward
    update: float  # what remains: the optimizer
    gather: float = 0.0  # with divided updates, the exchange of new values

    @property
    def busy(self) -> float:
        """Return the time until the rank has nothing left to do but wait for the others."""
        return self.input_wait + self.alone + self.hidden


@dataclass(frozen=True)
class Slowest:
    """The rank that the others wait for: how much later it is than their median, and in what."""

    rank: int
    host: str
    late: float
    cause: str


def steady(traces: Sequence[RankTrace]) -> list[RankTrace]:
    """Return the traces with the iterations that every rank has, without the first ones; ValueError if none."""
    if len({(trace.model, trace.segments) for trace in traces}) > 1:
        lines = "\n".join(
            f"rank {trace.rank}: model {trace.model}, segments {trace.segments}" for trace in traces
        )
        raise ValueError(
            f"the ranks reduced different segments:\n{lines}\nLikely cause: traces of several runs."
        )
    by_trace = [
        {iteration.iteration: iteration for iteration in trace.iterations} for trace in traces
    ]
    # The files of ranks end at different iterations, and may have lost different older halves.
    common = sorted(set.intersection(*map(set, by_trace)))
    if not common:
        counts = "\n".join(
            f"rank {trace.rank}: {len(trace.iterations)} iterations" for trace in traces
        )
        raise ValueError(f"no iteration was recorded on every rank:\n{counts}")
    counted_ids = common[WARM_UP:] or common[-1:]
    return [
        replace(trace, iterations=tuple(map(iterations.__getitem__, counted_ids)))
        for trace, iterations in zip(traces, by_trace)
    ]


def figures(trace: RankTrace) -> RankFigures:
    # An iteration has properties of the same names.
    names = [figure.name for figure in fields(RankFigures)[2:]]
    medians = [_median(trace, attrgetter(name)) for name in names]
    return RankFigures(trace.rank, trace.host, *medians)


def slowest(ranks: Sequence[RankFigures]) -> Slowest | None:
    """Return the rank that the others wait for; None if all are about as fast."""
    busiest = max(ranks, key=lambda rank: rank.busy)
    others = [rank for rank in ranks if rank is not busiest]
    # The trace of a single rank has nothing to compare.
    if not others:
        return None
    late = busiest.busy - statistics.median(rank.busy for rank in others)
    if late < _EVEN * busiest.step:
        return None
    input_wait = busiest.input_wait - statistics.median(rank.input_wait for rank in others)
    cause = "forward and backward"
    # Input is the cause if it is the larger part of the lag.
    if input_wait > late / 2:
        cause = "waiting for input"
    return Slowest(busiest.rank, busiest.host, late, cause)


_NEGLIGIBLE = 0.02  # fraction of a step that isn't worth a change
_MAJORITY = 0.9  # fraction of the bytes
_LARGE_UPDATE = 0.1  # fraction of a step that a divided update would save
_EQUAL = 4
"""Segments of equal bytes to try: about as fast as the best split that a model finds (docs/notes.md)."""
NETWORK = 0.2e9
"""Bytes a second between hosts. A core can send at least twice as much with each engine (docs/benchmarks.md), so that
what is slower is bound by the network.
"""


@dataclass(frozen=True)
class Diagnosis:
    situation: str
    reasons: str  # the figures that say so
    call: str | None  # the call to paste; None when there is none to try
    expectation: str  # how to find out what it brings, and what else may help


def diagnose(traces: Sequence[RankTrace], ranks: Sequence[RankFigures]) -> Diagnosis:
    """Return what the split does to the step of the rank that the others wait for."""
    busiest = max(ranks, key=lambda rank: rank.busy)
    trace = next(trace for trace in traces if trace.rank == busiest.rank)
    if busiest.exposed < _NEGLIGIBLE * busiest.step:
        reasons = f"Only {_ms(busiest.exposed)} of each step is exposed."
        expectation = _divide_update(traces, busiest) or "There is nothing to change."
        return Diagnosis("Communication is hidden behind backward.", reasons, None, expectation)
    situation, remedy, reasons = _situation(trace, busiest)
    call = None
    # Equal segments are proposed unless they have been tried already.
    if len(trace.segments) != _EQUAL:
        call = _split_call(trace.group)
    expectation = "npurun trace A B compares the steps of two traces." + _send_less(traces, busiest)
    if advice := _divide_update(traces, busiest):
        expectation += f" {advice}"
    return Diagnosis(f"{situation}: {remedy}.", reasons, call, expectation)


def _split_call(group: str) -> str:
    """Return the call that cuts the gradients into segments of equal bytes."""
    percentages = [100 // _EQUAL] * _EQUAL
    if group == WORLD_GROUP:
        return f"set_split_strategy_by_size({percentages})"
    return f"set_split_strategy_by_size({percentages}, group={group!r})"


def _situation(trace: RankTrace, rank: RankFigures) -> tuple[str, str, str]:
    """Return the situation, what the guide advises in it, and the figures that say so."""

    def start(segment: int) -> float:
        return _median(
            trace, lambda iteration: iteration.allreduce[segment][0] - iteration.fp_start
        )

    order = sorted(range(len(trace.segments)), key=start)
    total = max(1, trace.bytes)
    shares = [trace.bytes_of(segment) / total for segment in order]
    backward = rank.alone + rank.hidden
    overhang = _overhang(rank)
    # With one tensor that large, it matters little where the others are cut.
    if max(shares) >= _MAJORITY:
        segment = "The only segment has all"
        if len(order) > 1:
            segment = f"One of {len(order)} segments has {max(shares):.0%}"
        situation = "One segment has most of the bytes and ends after the backward pass"
        return situation, "add segments", f"{segment} of the bytes; {overhang}."
    beginning = (
        f"The backward pass ends {_ms(backward)} after the start of the step. The first segment ({shares[0]:.0%} of "
        f"the bytes) starts after {_ms(start(order[0]))}"
    )
    slack = _slack(trace, order[:-1])
    if slack < 0:
        return (
            "The first reductions start late and end after the backward pass",
            "move the cut forward",
            f"{beginning}; all but the last segment end {_ms(-slack)} after the backward pass; {overhang}.",
        )
    return (
        "The first reduction starts early and the last one is long",
        "move the cut back",
        f"{beginning}; all but the last segment end {_ms(slack)} before the backward pass, and the last one "
        f"({shares[-1]:.0%}) after it; {overhang}.",
    )


def _slack(trace: RankTrace, segments: Sequence[int]) -> float:
    """Return how long before the end of backward these segments are reduced; negative if after it."""

    def slack(iteration: Iteration) -> float:
        ends = [iteration.allreduce[segment][1] for segment in segments]
        return iteration.bp_end - max(ends, default=iteration.bp_end)

    return _median(trace, slack)


def _overhang(rank: RankFigures) -> str:
    """Return the words for the reduction after backward, which a split can shorten only so far."""
    share = f"{rank.exposed / rank.step:.0%} of a step"
    text = f"the reduction ends {_ms(rank.exposed)} after the backward pass, {share}"
    reduction = rank.hidden + rank.exposed
    if reduction > rank.alone + rank.hidden:
        text += (
            f". It takes {_ms(reduction)}, longer than the backward pass: no split can hide it all"
        )
    return text


def sent_per_second(traces: Sequence[RankTrace], rank: RankFigures) -> float:
    """Return the bytes that each host sends in a second of a reduction; 0.0 on a single host."""
    hosts = len({trace.host for trace in traces})
    # A ring of hosts sends everything twice, but for each host's own share.
    sent = traces[0].bytes * 2 * (hosts - 1) / hosts
    seconds = (rank.hidden + rank.exposed) * 1e-6
    return sent / max(seconds, 1e-9)


def _send_less(traces: Sequence[RankTrace], rank: RankFigures) -> str:
    """Return advice to send less if the network between hosts is the limit, and not a core."""
    is_wide = any(gradient.dtype in ("float32", "float64") for gradient in traces[0].gradients)
    speed = sent_per_second(traces, rank)
    if not is_wide or not 0 < speed < NETWORK:
        return ""
    return (
        f" Each host sends {speed * 8e-9:.1f} Gbit/s, less than a core can send: the network is the limit. "
        'compression="bf16" halves the bytes, if you don\'t use it yet.'
    )


def saved_by_dividing(traces: Sequence[RankTrace], rank: RankFigures) -> float:
    """Return the time of a step that a divided update would save; 0.0 if it is divided, or can't be."""
    # TensorFlow's engine and NCCL have no call for it.
    has_owners = traces[0].engine in ("shared_memory", "tcp", "mpi")
    if rank.gather or not has_owners:
        return 0.0
    # In a divided update, each rank updates only its share of the variables.
    return rank.update * (1 - 1 / traces[0].world_size)


def _divide_update(traces: Sequence[RankTrace], rank: RankFigures) -> str:
    """Return advice to divide the update, if that takes a large part of the step."""
    if saved_by_dividing(traces, rank) < _LARGE_UPDATE * rank.step:
        return ""
    return f"Each rank makes the whole update, in {_ms(rank.update)}: shard_optimizer=True divides it among the ranks."


def _median(trace: RankTrace, figure: Callable[[Iteration], float]) -> float:
    return statistics.median(map(figure, trace.iterations))


def _ms(microseconds: float) -> str:
    return f"{microseconds / 1e3:.1f} ms"


@dataclass(frozen=True)
class Analysis:
    traces: tuple[RankTrace, ...]  # traces of all ranks, with the iterations that count
    ranks: tuple[RankFigures, ...]  # figures of where the time of each rank goes
    slowest: Slowest | None  # the rank that the others wait for
    diagnosis: Diagnosis  # what the split does, and what to do

    @property
    def times(self) -> list[float]:
        """Return the length of each iteration, which is over when it is over on all ranks."""
        times_of_ranks = [
            [iteration.step for iteration in trace.iterations] for trace in self.traces
        ]
        return list(map(max, zip(*times_of_ranks)))

    @property
    def shown(self) -> int:
        """Return the position of the iteration of median length, which is drawn."""
        times = self.times
        return sorted(range(len(times)), key=times.__getitem__)[len(times) // 2]

    @property
    def busiest(self) -> RankFigures:
        """Return the figures of the rank that has most to do."""
        return max(self.ranks, key=lambda rank: rank.busy)


def analyse(traces: Sequence[RankTrace]) -> Analysis:
    """Return what the iterations show that every rank has recorded, without the first ones."""
    traces = steady(traces)
    ranks = [figures(trace) for trace in traces]
    return Analysis(tuple(traces), tuple(ranks), slowest(ranks), diagnose(traces, ranks))
