"""Reads a trace for the tuner: when the gradients are ready, and how long the steps took.

All times are medians over the traced iterations, each of the slowest rank in it: the collectives wait for that rank,
and the others' wait is not communication.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from npu_device._src.trace.records import Iteration, RankTrace, on_all_ranks
from npu_device._src.tuning.cost_model import CostModel
from npu_device._src.tuning.planner import Backward, without_collectives
from npu_device._src.tuning.simulate import TracedStep


@dataclass(frozen=True)
class TracedRun:
    """A traced run.

    Attributes:
        step: its step, for planner and simulation.
        dtype: the dtype of the gradients, or of those with the most bytes where there are several dtypes.
        group: the group in which they are reduced.
        hosts: name of each rank's host, by rank.
        backend: the backend that reduced them.
        ends: the last gradient of each segment.
        seconds: of every traced iteration, from the end of the previous one to its own.
        exposed: seconds from the end of the slowest rank's backward to the end of the last collective.
    """

    step: TracedStep
    dtype: str
    group: str
    hosts: tuple[str, ...]
    backend: str
    ends: tuple[int, ...]
    seconds: tuple[float, ...]
    exposed: float

    @property
    def median(self) -> float:
        """Return the seconds of a step."""
        return statistics.median(self.seconds)

    def without_collectives(self, cost: CostModel) -> TracedStep:
        """Return the step as it would have been if no collective had taken processor time from backward."""
        return TracedStep(without_collectives(self.step.backward, cost, self.ends), self.step.rest)


def summarise(traces: Sequence[RankTrace], skip: int = 0) -> TracedRun:
    """Summarise a trace.

    Args:
        traces: of all ranks.
        skip: number of iterations to leave out at the beginning, as warm-up.

    Raises:
        ValueError: no ranks, ranks missing, no iterations left, or ranks that reduced different gradients.
    """
    iterations = _checked(traces, skip)
    first = traces[0]
    weight: dict[str, int] = {}
    for gradient in first.gradients:
        weight[gradient.dtype] = weight.get(gradient.dtype, 0) + gradient.bytes
    dtype = max(weight, key=lambda name: weight[name])
    # Gradients whose size isn't known before the graph runs travel alone; no split counts them.
    mine = [number for number, gradient in enumerate(first.gradients) if gradient.dtype == dtype and gradient.bytes]
    times = [[max(one.ready[position] - one.fp_start for one in each) for position in mine] for each in iterations]
    ready = [_median(each) for each in zip(*times)]
    # The last rank differs between iterations, and each rank's own median is earlier; one value stands for them all.
    ready[ready.index(max(ready))] = _median(map(max, times))
    end = _median(max(one.bp_end - one.fp_start for one in each) for each in iterations)
    slowest = tuple(max(one.time for one in each) * 1e-6 for each in iterations)
    step = statistics.median(slowest)
    over = _median(min(one.exposed for one in each) for each in iterations)
    places = {position: place for place, position in enumerate(mine)}
    backward = Backward(tuple(first.gradients[position].bytes for position in mine), tuple(ready), end)
    return TracedRun(
        step=TracedStep(backward, max(0.0, step - end - over)),
        dtype=dtype,
        group=first.group,
        hosts=tuple(trace.host for trace in sorted(traces, key=lambda trace: trace.rank)),
        backend=first.backend,
        ends=tuple(places[last] for _, last in first.segments if last in places),
        seconds=slowest,
        exposed=over,
    )


def _checked(traces: Sequence[RankTrace], skip: int) -> list[tuple[Iteration, ...]]:
    """Return the iterations that count, each on all ranks."""
    if not traces:
        raise ValueError("there is no trace in the directory")
    missing = sorted(set(range(traces[0].world_size)) - {trace.rank for trace in traces})
    if missing:
        raise ValueError(f"the trace of rank(s) {', '.join(map(str, missing))} of {traces[0].world_size} is missing")
    iterations = on_all_ranks(traces)[skip:]
    if not iterations:
        lines = "\n".join(f"rank {trace.rank}: {len(trace.iterations)}" for trace in traces)
        raise ValueError(
            f"too few iterations were traced; expected {skip + 1} at least that all ranks have, found\n{lines}\n"
            "What to do: let the script run for more steps."
        )
    different = [trace for trace in traces if trace.model != traces[0].model]
    if different:
        lines = "\n".join(f"rank {trace.rank}: {trace.model}" for trace in traces)
        raise ValueError(
            f"the ranks reduced different gradients; their fingerprints are\n{lines}\nLikely cause: the directory has "
            "traces of several runs."
        )
    return iterations


def _median(microseconds: Iterable[float]) -> float:
    """Return the median, in seconds."""
    return statistics.median(microseconds) * 1e-6
