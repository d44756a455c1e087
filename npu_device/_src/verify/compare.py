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
_PURE = 0.05  # of a tensor's norm: less is left when the other run's is scaled, so it is a multiple


@dataclass
class Step:
    """A step of an optimizer on one rank: a row of summaries for each variable, and the rows of the batches before."""

    optimizer: int
    gradients: np.ndarray
    weights: np.ndarray
    rows: Counter[int] = field(default_factory=Counter)
    reduced: list[tuple[str, np.ndarray]] = field(default_factory=list)


@dataclass
class Record:
    """What one process has left."""

    facts: dict[str, Any]
    steps: list[Step]

    def calls(self, kind: str) -> list[dict[str, Any]]:
        """Return the calls of a kind that the script has made, with their lines."""
        return [call for call in self.facts["calls"] if call["kind"] == kind]


@dataclass(frozen=True)
class Deviation:
    """A variable whose gradient or update isn't that of one process.

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
        else:
            gradients, weights = np.array(event["gradients"]), np.array(event["weights"])
            steps.append(Step(event["which"], gradients, weights, rows, reduced))
            rows, reduced = Counter(), []
    return Record(facts, steps)


def together(records: Sequence[Record]) -> list[tuple[Step, ...]]:
    """Return the steps that all processes have made, in order."""
    return list(zip(*(record.steps for record in records)))


def union(steps: Sequence[Step]) -> Counter[int]:
    """Return the rows of all ranks' batches in one step."""
    return sum((step.rows for step in steps), Counter())


def deviations(
    one: Sequence[np.ndarray], again: Sequence[np.ndarray], other: Sequence[np.ndarray], names: Sequence[Sequence[str]]
) -> list[Deviation]:
    """Return what differs in a series of summaries.

    Args:
        one: of the single process: for each step an array of a row per variable (norm, projections).
        again: of the single process with changed inputs.
        other: of a rank.
        names: of the variables, for each step.
    """
    found = []
    for number, (mine, moved, theirs) in enumerate(zip(one, again, other), start=1):
        for place, name in enumerate(names[number - 1]):
            a, b, c = mine[place], moved[place], theirs[place]
            if np.isnan(a).all() and np.isnan(c).all():
                continue
            size = max(float(np.linalg.norm(a)), 1e-30)
            allowed = _TIMES_ROUNDING * float(np.linalg.norm(b - a)) / size + _LEAST
            off = float(np.linalg.norm(c - a)) / size
            if off <= allowed:
                continue
            ratio = float(np.dot(c, a) / np.dot(a, a))
            rest = float(np.linalg.norm(c - ratio * a)) / max(abs(ratio) * size, 1e-30)
            pure = rest <= max(_PURE, allowed) and abs(ratio - 1) > _PURE
            found.append(Deviation(number, name, ratio if pure else None, off, allowed))
    return found


def equal(first: np.ndarray, second: np.ndarray) -> bool:
    """Return True if two summaries of the same tensors are equal but for rounding."""
    if first.shape != second.shape:
        return False
    return bool(np.allclose(first, second, rtol=1e-4, atol=1e-12, equal_nan=True))
