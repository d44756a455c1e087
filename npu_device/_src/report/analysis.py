"""Everything that the report says about a trace, computed once for text and charts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from npu_device._src.report.diagnosis import Diagnosis, diagnose
from npu_device._src.report.figures import RankFigures, Slowest, figures, median_iteration, slowest, steady
from npu_device._src.trace.records import RankTrace


@dataclass(frozen=True)
class Analysis:
    """The findings.

    Attributes:
        traces: of all ranks, with the iterations that count.
        ranks: where each rank's time goes.
        slowest: the rank that the others wait for.
        shown: number of the iteration to draw.
        diagnosis: what the split does, and what to do.
    """

    traces: tuple[RankTrace, ...]
    ranks: tuple[RankFigures, ...]
    slowest: Slowest | None
    shown: int
    diagnosis: Diagnosis


def analyse(traces: Sequence[RankTrace]) -> Analysis:
    """Analyse the traces of a job.

    Raises:
        ValueError: no iteration that all ranks have, or ranks that reduced different segments.
    """
    kept = steady(traces)
    ranks = [figures(trace) for trace in kept]
    return Analysis(tuple(kept), tuple(ranks), slowest(ranks), median_iteration(kept), diagnose(kept, ranks))
