"""Checks the tuner's plans: tries the best few splits and the present one in turn, and keeps the fastest.

A split is read when a step is traced, so each trial is a short run of the script from its start. The caller starts and
stops the runs (``npu_device.launch.tune``). Imports no TensorFlow.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Callable, Optional

from npu_device._src.tuning.cost_model import CostModel
from npu_device._src.tuning.planner import Plan, contenders, predict
from npu_device._src.tuning.traced_run import TracedRun

WARM_UP = 2
"""Traced iterations at the start of each run that don't count."""

FIRST = "first"
"""Name of the run that traces the split as it is, and of its directory."""


@dataclass(frozen=True)
class Budget:
    """The number of trials; the defaults count 50 steps in all.

    Attributes:
        first: steps of the first run, which shows when the gradients are ready.
        plans: maximum number of splits to try besides the present one.
        rounds: number of runs of each.
        steps: steps that count in each of these runs.
    """

    first: int = 10
    plans: int = 3
    rounds: int = 2
    steps: int = 5


@dataclass
class Tried:
    """A split and its measured steps. ``measured`` has one run for each round."""

    label: str
    plan: Plan
    runs: list[TracedRun] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """Return the seconds of an undisturbed step, the median of the runs."""
        return statistics.median(self.undisturbed)

    @property
    def exposed(self) -> float:
        """Return the seconds of communication after backward, the median of the runs."""
        return statistics.median(run.exposed for run in self.runs)

    @property
    def undisturbed(self) -> list[float]:
        """Return the seconds of a step for each run, the lower quartile: disturbances only make steps longer."""
        return [sorted(run.seconds)[len(run.seconds) // 4] for run in self.runs]

    def faster_than(self, other: Tried) -> bool:
        """Return True when it was faster in every round: a machine that gets slower or faster does so for both."""
        return all(mine < theirs for mine, theirs in zip(self.undisturbed, other.undisturbed))


@dataclass(frozen=True)
class TuningResult:
    """The result of tuning.

    Attributes:
        traced: the first run, with the split that the script has now.
        cost: the measured collectives.
        tried: the present split first, then the plans.
        chosen: the fastest of those that were faster than the present split, else the present one.
    """

    traced: TracedRun
    cost: CostModel
    tried: tuple[Tried, ...]
    chosen: Tried

    @property
    def gained(self) -> bool:
        """Return True when another split than the present one was faster."""
        return self.chosen is not self.tried[0]


Run = Callable[[str, Optional[Sequence[int]], int], TracedRun]
"""Runs the script: name of the run, the split (None: as the script is), steps that count."""


def tune(run: Run, measure: Callable[[int], CostModel], report: Callable[[str], None], budget: Budget) -> TuningResult:
    """Find the best split of a script.

    Args:
        run: runs the script once.
        measure: measures the collectives, given the bytes of all gradients.
        report: reports progress to the user.
        budget: the number of trials.

    Raises:
        ValueError: the script doesn't take the split that it is given, since it sets its own; a trace is of no use.
    """
    report("run 1: when the gradients are ready, with the split as it is now")
    first = run(FIRST, None, budget.first)
    report("measuring the collectives")
    cost = measure(sum(first.step.backward.sizes))
    backward = first.without_collectives(cost).backward
    present = Tried("as it is now", predict(backward, cost, first.ends))
    plans = [plan for plan in contenders(backward, cost, budget.plans) if plan.ends != first.ends]
    tried = (present, *(Tried(f"plan {number}", plan) for number, plan in enumerate(plans, start=1)))
    number = 1
    for round_number in range(budget.rounds if plans else 0):
        # Back and forth, so that a machine that gets slower or faster affects all alike.
        for one in tried if round_number % 2 == 0 else tried[::-1]:
            number += 1
            ends = None if one is present else one.plan.ends
            report(
                f"run {number} of {1 + budget.rounds * len(tried)}: {one.label}, segments end at {list(one.plan.ends)}"
            )
            result = run(f"run{number}", ends, budget.steps)
            _require_split(one, result)
            one.runs.append(result)
    if not plans:
        present.runs.append(first)
    faster = [one for one in tried[1:] if one.faster_than(present)]
    return TuningResult(first, cost, tried, min(faster, key=lambda one: one.seconds, default=present))


def _require_split(wanted: Tried, result: TracedRun) -> None:
    if result.ends != wanted.plan.ends:
        raise ValueError(
            f"the run should have cut the gradients at {list(wanted.plan.ends)}, but cut them at {list(result.ends)}.\n"
            "Likely cause: a split strategy set in the script (hccl.split.api) takes precedence over the tuner's; or "
            "the gradients differ from run to run.\n"
            "What to do: remove the call of set_split_strategy_by_idx or set_split_strategy_by_size while tuning."
        )
