"""Compares the records of runs: which samples, gradients and updates of N ranks are not those of one process.

The tolerance isn't a constant: what moves when the inputs of the single process change in their last bit is rounding.
Numpy only.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from npu_device._src.verify.process_settings import FACTS, STEPS

_TIMES_ROUNDING = 30.0  # of what the perturbed run moves; sums over ranks are rounded more often than once
_LEAST = 1e-6  # of a tensor's norm: float32's own rounding in sums of a few hundred terms
_LEAST_UNPERTURBED = 1e-3  # of sessions, whose inputs aren't changed
_ROUNDINGS = 4 * 2.0**-23  # of the norm of the weights: float32 rounds them at each update
_PURE = 0.05  # of a tensor's norm: less is left when the other run's is scaled, so it is a multiple


@dataclass
class Step:
    """A step of an optimizer in one process.

    Attributes:
        optimizer: its number, or a session's name.
        gradients: a row of summaries (norm, projections) for each variable that is trained.
        weights: the same of these variables before the step, and of those that no optimizer trains.
        rows: the samples that were read since the step before.
        reduced: line and summaries of what was given to reductions since then.
        logs: what the script sees of the step.
    """

    optimizer: int | str
    gradients: np.ndarray
    weights: np.ndarray
    rows: Counter[int] = field(default_factory=Counter)
    reduced: list[tuple[str, np.ndarray]] = field(default_factory=list)
    logs: dict[str, float] = field(default_factory=dict)


@dataclass
class Record:
    """What one process has left."""

    facts: dict[str, Any]
    steps: list[Step]

    def calls(self, kind: str) -> list[dict[str, Any]]:
        """Return the calls of a kind that the script has made, with their lines."""
        return [call for call in self.facts["calls"] if call["kind"] == kind]

    def updates(self, number: int) -> np.ndarray | None:
        """Return what a step has added to the weights, as projections, since norms can't be subtracted."""
        step = self.steps[number]
        later = [other for other in self.steps[number + 1 :] if other.optimizer == step.optimizer]
        return later[0].weights[:, 1:] - step.weights[:, 1:] if later else None


@dataclass(frozen=True)
class Deviation:
    """A variable whose gradient, update or value isn't that of one process.

    Attributes:
        step: number of the step, from 1.
        variable: its name.
        ratio: the multiple of one process's that it is; None if it points elsewhere.
        off: the difference, relative to one process's norm.
        allowed: what rounding explains.
    """

    step: int
    variable: str
    ratio: float | None
    off: float
    allowed: float


def read(folder: Path) -> Record:
    """Read the record of a process."""
    facts = json.loads((folder / FACTS).read_text(encoding="utf-8"))
    steps: list[Step] = []
    rows: Counter[int] = Counter()
    reduced: list[tuple[str, np.ndarray]] = []
    for line in (folder / STEPS).read_text(encoding="utf-8").splitlines():
        event = json.loads(line)
        if event["kind"] == "rows":
            rows.update(event["rows"])
        elif event["kind"] == "reduced":
            reduced.append((event["which"], np.array(event["values"])))
        elif event["kind"] == "logs":
            steps[-1].logs.update(event["values"])
        else:
            gradients, weights = np.array(event["gradients"]), np.array(event["weights"])
            steps.append(Step(event["which"], gradients, weights, rows, reduced))
            rows, reduced = Counter(), []
    return Record(facts, steps)


def union(steps: Sequence[Step]) -> Counter[int]:
    """Return the rows of all ranks' batches in one step."""
    return sum((step.rows for step in steps), Counter())


def deviations(
    one: Sequence[Any], again: Sequence[Any], other: Sequence[Any], names: Sequence[Sequence[str]]
) -> list[Deviation]:
    """Return what differs in a series of values.

    Args:
        one: of the single process: for each step an array for each name.
        again: of the single process with changed inputs.
        other: of a rank.
        names: for each step.
    """
    steps = enumerate(zip(names, one, again, other), start=1)
    return [each for number, (named, *arrays) in steps for each in _of_step(number, named, arrays)]


def between(one: Record, again: Record, other: Record) -> tuple[list[Deviation], ...]:
    """Return in which gradients, updates, and variables that no optimizer trains a rank differs from one process.

    Args:
        one: of the single process.
        again: of the single process with changed inputs.
        other: of the rank.
    """
    found: tuple[list[Deviation], ...] = ([], [], [])
    for number, steps in enumerate(zip(one.steps, again.steps, other.steps)):
        names, trained = one.facts["variables"][str(steps[0].optimizer)], len(steps[0].gradients)
        least = _LEAST_UNPERTURBED if np.isnan(steps[0].gradients).all() else _LEAST
        made = [record.updates(number) for record in (one, again, other)]
        for kind, named, arrays in (
            (0, names, [step.gradients for step in steps]),
            (1, names, [update[:trained] for update in made if update is not None]),
            (2, names[trained:], [step.weights[trained:] for step in steps]),
        ):
            if len({len(array) for array in arrays}) == 1 and len(arrays) == len(steps):
                floor = _LEAST * float(np.nanmax(np.abs(arrays[0]), initial=0))
                # An update is what is left when rounded weights are subtracted.
                weights = np.linalg.norm(steps[0].weights[:trained, 1:], axis=1) if kind == 1 else np.zeros(len(named))
                found[kind].extend(_of_step(number + 1, named, arrays, least, floor, _ROUNDINGS * weights))
    return found


def _of_step(
    number: int,
    names: Sequence[str],
    arrays: Sequence[Any],
    least: float = _LEAST,
    floor: float = 0.0,
    rounding: Any = None,
) -> list[Deviation]:
    slack = np.zeros(len(names)) if rounding is None else rounding
    each_of = zip(names, slack, *arrays)
    found = [_deviation(number, name, values, least, floor + 1e-30, more) for name, more, *values in each_of]
    return [each for each in found if each is not None]


def _deviation(
    step: int, name: str, summaries: Sequence[np.ndarray], least: float, floor: float, rounding: float
) -> Deviation | None:
    one, again, other = summaries
    if np.isnan(one).all() and np.isnan(other).all():
        return None
    size = max(float(np.linalg.norm(one)), floor)
    allowed = _TIMES_ROUNDING * float(np.linalg.norm(again - one)) / size + least + rounding / size
    off = float(np.linalg.norm(other - one)) / size
    if off <= allowed:
        return None
    ratio = float(np.dot(other, one) / max(np.dot(one, one), 1e-60))
    rest = float(np.linalg.norm(other - ratio * one)) / max(abs(ratio) * size, 1e-30)
    is_multiple = rest <= max(_PURE, allowed) and abs(ratio - 1) > _PURE
    return Deviation(step, name, ratio if is_multiple else None, off, allowed)


def equal(first: np.ndarray, second: np.ndarray) -> bool:
    """Return True if two summaries of the same tensors are equal but for rounding."""
    if first.shape != second.shape:
        return False
    return bool(np.allclose(first, second, rtol=1e-4, atol=1e-12, equal_nan=True))
