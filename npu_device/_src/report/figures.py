"""A trace in figures: where the time of a step goes, and which rank the others wait for.

Medians over the iterations, in microseconds. Imports no TensorFlow.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from npu_device._src.trace.records import RankTrace, on_all_ranks

WARM_UP = 2
"""Recorded iterations at the beginning that don't count: they compile, and fill caches."""

_EVEN = 0.02  # a rank within this part of a step of the others is as fast as they are


@dataclass(frozen=True)
class RankFigures:
    """The parts of a rank's step.

    Attributes:
        rank: the rank.
        host: its host.
        step: the whole step, from the end of the one before it.
        input_wait: before forward begins.
        alone: forward and backward while nothing is reduced.
        hidden: forward and backward while segments are reduced.
        exposed: reduction after backward.
        update: what remains: the optimizer.
    """

    rank: int
    host: str
    step: float
    input_wait: float
    alone: float
    hidden: float
    exposed: float
    update: float

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
    """Return the traces (of at least one rank) with the iterations that every rank has, without the first ones.

    Raises:
        ValueError: no iteration that all ranks have, or ranks that reduced different segments.
    """
    if len({(trace.model, trace.segments) for trace in traces}) > 1:
        lines = "\n".join(f"rank {trace.rank}: model {trace.model}, segments {trace.segments}" for trace in traces)
        raise ValueError(f"the ranks reduced different segments:\n{lines}\nLikely cause: traces of several runs.")
    together = on_all_ranks(traces)
    if not together:
        counts = "\n".join(f"rank {trace.rank}: {len(trace.iterations)} iterations" for trace in traces)
        raise ValueError(f"no iteration was recorded on every rank:\n{counts}")
    kept = zip(*(together[WARM_UP:] or together[-1:]))
    return [replace(trace, iterations=iterations) for trace, iterations in zip(traces, kept)]


def figures(trace: RankTrace) -> RankFigures:
    """Return the medians of a rank."""
    ones = trace.iterations
    hidden = statistics.median(one.hidden for one in ones)
    return RankFigures(
        rank=trace.rank,
        host=trace.host,
        step=statistics.median(one.time for one in ones),
        input_wait=statistics.median(one.input_wait or 0.0 for one in ones),
        alone=statistics.median(one.bp_end - one.fp_start - one.hidden for one in ones),
        hidden=hidden,
        exposed=statistics.median(one.exposed for one in ones),
        update=statistics.median(one.iteration_end - max(one.bp_end, one.last_reduced) for one in ones),
    )


def slowest(ranks: Sequence[RankFigures]) -> Slowest | None:
    """Return the rank that the others wait for; None when they are alike. Needs no common clock."""
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
    """Return the number of the iteration of median length."""
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
