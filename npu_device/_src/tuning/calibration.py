"""Calibrates the cost model with the tuner's runs: the speed of collectives beside the script's own backward pass."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from npu_device._src.tuning.cost_model import CostModel
from npu_device._src.tuning.planner import predict
from npu_device._src.tuning.traced_run import TracedRun

# Standard deviations of the measurement and of a run. Values that the runs don't cover keep their measured figures.
_FACTOR_SPREAD = 0.07  # of the logarithm
_PACE_SPREAD = 0.1
_EXPOSED_SPREAD = 0.05  # of a step
_REACH = 3  # standard deviations
_POINTS = 13
_ROUNDS = 3  # of looking, each a third as wide as the one before


def calibrated(first: TracedRun, cost: CostModel, runs: Sequence[TracedRun]) -> CostModel:
    """Return the cost model that agrees best with the runs: the most likely factor for its times, and its pace.

    Args:
        first: the run whose backward pass predictions start from.
        cost: as measured.
        runs: of some splits, the more different the better.

    Returns:
        The measured model with other times and another pace; the same where there are no runs.
    """
    if not runs:
        return cost
    exposed: dict[tuple[int, ...], list[float]] = {}
    for run in runs:
        exposed.setdefault(run.ends, []).append(run.exposed)
    error = _EXPOSED_SPREAD * statistics.median(run.median for run in runs)

    def unlikely(factor: float, pace: float) -> float:
        model = _changed(cost, factor, pace)
        backward = first.without_collectives(model).backward
        misfit = (math.log(factor) / _FACTOR_SPREAD) ** 2 + ((pace - cost.pace) / _PACE_SPREAD) ** 2
        for ends, each in exposed.items():
            predicted = predict(backward, model, ends).exposed
            misfit += sum(((one - predicted) / error) ** 2 for one in each)
        return misfit

    best = (1.0, cost.pace)
    for looking in range(_ROUNDS):
        steps = np.linspace(-_REACH, _REACH, _POINTS) / 3**looking
        factors = best[0] * np.exp(steps * _FACTOR_SPREAD)
        paces = np.unique(np.clip(best[1] + steps * _PACE_SPREAD, 0.05, 1.0))
        best = min(itertools.product(factors, paces), key=lambda point: unlikely(*point))
    return _changed(cost, *map(float, best))


def _changed(cost: CostModel, factor: float, pace: float) -> CostModel:
    return replace(
        cost,
        alpha=cost.alpha * factor,
        beta=cost.beta * factor,
        busy=cost.busy * factor,
        pack=cost.pack * factor,
        pace=pace,
    )
