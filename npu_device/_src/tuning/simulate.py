"""Forecasts a traced model's step time and efficiency on N ranks and another network, before machines are rented.

``ASSUMPTIONS``, which users see, too, lists the assumptions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from npu_device._src.tuning.networks import SHAPES, Network
from npu_device._src.tuning.planner import Backward, best_plan, default_plan

RANKS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)

ASSUMPTIONS = """\
Assumptions: each rank does the work of a traced rank, on its own batch and its own machine (weak scaling), as fast as
the slowest of them. Input, backward and update take as long as traced. Communication costs the processors nothing
beyond what was measured: packing, and what collectives and backward take from each other. A message takes
alpha + beta * bytes between any two ranks. Nobody else uses the network, and it is never congested. Segments travel one
after the other. No rank is late. Real runs are slower, the more so with more ranks."""


@dataclass(frozen=True)
class TracedStep:
    """A traced step, in seconds.

    Attributes:
        backward: the gradients, from the start of the forward pass.
        rest: the time besides forward, backward and communication: input wait and update.
    """

    backward: Backward
    rest: float

    @property
    def alone(self) -> float:
        """Return the seconds of a step without any communication."""
        return self.backward.end + self.rest


@dataclass(frozen=True)
class Expected:
    """The forecast for a number of ranks.

    Attributes:
        ranks: the number.
        shape: ``"ring"`` or ``"tree"``.
        default: seconds per step with Ascend's default split.
        tuned: seconds per step with the best split for this number of ranks.
        ends: that split.
        alone: seconds per step without communication.
    """

    ranks: int
    shape: str
    default: float
    tuned: float
    ends: tuple[int, ...]
    alone: float

    @property
    def efficiency(self) -> float:
        """Return the part of the perfect speed-up that remains with the best split, 0 to 1."""
        return self.alone / self.tuned

    @property
    def default_efficiency(self) -> float:
        """Return the same with the default split."""
        return self.alone / self.default


def simulate(step: TracedStep, network: Network, ranks: Sequence[int] = RANKS) -> list[Expected]:
    """Return the expected step times of a model.

    Args:
        step: the traced step.
        network: latency and bandwidth between two ranks.
        ranks: numbers of ranks, each from 1.

    Returns:
        For each shape of ``networks.SHAPES`` one row for each number of ranks.

    Raises:
        ValueError: a number of ranks below 1.
    """
    if min(ranks) < 1:
        raise ValueError(f"ranks are {list(ranks)}; expected numbers from 1")
    rows = []
    for shape, cost_of in SHAPES.items():
        for count in ranks:
            if count == 1:
                everything = (len(step.backward.sizes) - 1,)
                rows.append(Expected(1, shape, step.alone, step.alone, everything, step.alone))
                continue
            cost = cost_of(network, count)
            best, default = best_plan(step.backward, cost), default_plan(step.backward, cost)
            rows.append(
                Expected(count, shape, step.alone + default.added, step.alone + best.added, best.ends, step.alone)
            )
    return rows


def table(rows: Sequence[Expected]) -> str:
    """Return the rows as text, one line for each number of ranks and shape."""
    lines = [f"{'':14}{'default split':>24}{'best split':>22}", f"{'ranks':>6} {'shape':6}"]
    lines[1] += f"{'ms per step':>14}{'efficiency':>12}{'ms per step':>12}{'efficiency':>12}{'speed-up':>11}  segments"
    for row in rows:
        lines.append(
            f"{row.ranks:>6} {row.shape:6}{row.default * 1e3:>14.1f}{row.default_efficiency:>12.1%}"
            f"{row.tuned * 1e3:>12.1f}{row.efficiency:>12.1%}{row.ranks * row.efficiency:>11.1f}  {len(row.ends)}"
        )
    return "\n".join(lines)
