"""The tuner's calibration: from runs that a model made, it finds that model again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from npu_device._src.tuning.calibration import calibrated
from npu_device._src.tuning.cost_model import CostModel
from npu_device._src.tuning.planner import Backward, predict
from npu_device._src.tuning.simulate import TracedStep
from npu_device._src.tuning.traced_run import TracedRun

COST = CostModel(1e-3, 4e-9, busy=5e-4, load=0.9, pace=0.8)
ALONE = Backward((5_000_000,) * 20, tuple(0.015 * number for number in range(1, 21)), 0.3)
SPLITS = ([19], [14, 19], [4, 9, 14, 19])


def run(cost: CostModel, ends: Sequence[int]) -> TracedRun:
    """Return what the trace of a step with such collectives shows."""
    plan = predict(ALONE, cost, ends)
    backward = Backward(ALONE.sizes, ALONE.ready, ALONE.end + plan.late)
    hosts, seconds = ("a", "b"), (backward.end + plan.exposed,) * 5
    return TracedRun(TracedStep(backward, 0.0), "float32", "g", hosts, "tensorflow", tuple(ends), seconds, plan.exposed)


@pytest.mark.parametrize(("factor", "pace"), [(1.0, 0.8), (1.2, 0.8), (1.0, 0.6), (0.85, 0.65), (1.3, 0.9)])
def test_what_made_the_runs_is_found(factor: float, pace: float) -> None:
    truth = replace(COST, alpha=COST.alpha * factor, beta=COST.beta * factor, busy=COST.busy * factor, pace=pace)
    many = 20 * [run(truth, ends) for ends in SPLITS]  # so that what was measured counts for little
    found = calibrated(run(truth, [19]), COST, many)
    assert found.beta / COST.beta == pytest.approx(factor, rel=0.04)
    assert found.alpha / COST.alpha == pytest.approx(factor, rel=0.04)
    assert found.pace == pytest.approx(pace, abs=0.05)
    assert (found.load, found.alpha_error) == (COST.load, COST.alpha_error)


def test_what_the_runs_say_nothing_of_stays_as_measured() -> None:
    truth = replace(COST, pace=0.5)
    one_segment = run(truth, [19])  # begins when backward is over
    found = calibrated(one_segment, COST, [one_segment])
    assert found.pace == COST.pace
    assert found.beta == pytest.approx(COST.beta)
    assert calibrated(one_segment, COST, []) == COST
