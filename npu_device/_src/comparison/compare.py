"""What a process that is compared keeps of its steps, and what of it isn't as in one process: gradients, updates,
other variables. Numpy only.

The tolerance isn't a constant: what moves when the inputs of the single process change in their last bit is rounding.
"""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

PROJECTIONS = 12  # kept of a tensor
GRADIENT, UPDATE, STATE = "gradient", "update", "state"

_FILE = "record.pickle"
_TIMES_ROUNDING = 30.0  # of what the perturbed run moves; sums over ranks are rounded more often than once
_LEAST = 1e-6  # of a tensor's norm: float32's own rounding in sums of a few hundred terms
_LEAST_UNPERTURBED = 1e-3  # of sessions, whose inputs aren't changed, and of averages, that may travel in 16 bits
_ROUNDINGS = 4 * 2.0**-23  # of the norm of the weights: float32 rounds them at each update
_MOST = 0.75  # of the variables; what moves these may move any
_PURE = 0.1  # of a tensor's norm: less is left when the other run's is scaled, so it is a multiple


def _nothing() -> np.ndarray:
    return np.zeros([0, PROJECTIONS])


@dataclass
class Step:
    """A step of an optimizer in one process."""

    optimizer: str = ""
    names: Sequence[str] = ()  # of the variables: those that are trained, then those that no optimizer trains
    gradients: np.ndarray = field(default_factory=_nothing)  # a row of projections for each one that is trained
    weights: np.ndarray = field(default_factory=_nothing)  # of all before the step
    rows: Counter[int] = field(default_factory=Counter)  # the samples that were read since the step before
    own: dict[int, np.ndarray] = field(default_factory=dict)  # sums of what tapes gave since then, with Horovod's names
    logs: dict[str, float] = field(default_factory=dict)  # what the script sees of the step

    @property
    def trained(self) -> int:
        """Return the number of variables that are trained."""
        return len(self.gradients)


@dataclass(frozen=True)
class Call:
    """A call of the script that may explain a difference."""

    kind: str
    line: str
    what: str = ""
    outcome: Any = None  # which processes may have to share

    def __str__(self) -> str:
        return ", ".join(filter(None, (self.what, self.line)))


@dataclass
class Record:
    """What one process leaves."""

    steps: list[Step] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    joined: bool = False  # it was a rank of a job
    horovod: bool = False  # by Horovod's names
    last_bit: float = 0.0  # of the dtype in which its models compute

    def of(self, kind: str) -> list[Call]:
        """Return the calls of a kind."""
        return [call for call in self.calls if call.kind == kind]

    def update(self, number: int) -> np.ndarray:
        """Return what a step has added to the weights that are trained; nothing if that isn't known."""
        step = self.steps[number]
        later = [other for other in self.steps[number + 1 :] if other.optimizer == step.optimizer]
        return (later[0].weights - step.weights)[: step.trained] if later else _nothing()

    def save(self, folder: Path) -> None:
        """Write the record; others see all of it or none."""
        part = folder / f"{_FILE}.part"
        part.write_bytes(pickle.dumps(self))
        part.replace(folder / _FILE)


def exists(folder: Path) -> bool:
    """Return True if a process has left its record."""
    return (folder / _FILE).exists()


def load(folder: Path) -> Record:
    """Return the record of a process."""
    record: Record = pickle.loads((folder / _FILE).read_bytes())
    return record


def average_of(ranks: Sequence[Record]) -> Record:
    """Return what stands for one process where ranks can't equal it: their samples, and the average of the gradients
    that each has computed.
    """
    steps = []
    for number, each in enumerate(zip(*(record.steps for record in ranks))):
        own = [step.own.get(step.trained) for step in each]
        known = [gradients for gradients in own if gradients is not None]
        average = np.mean(known, axis=0) if len(known) == len(each) else each[0].gradients
        first = ranks[0].steps[number]
        steps.append(Step(first.optimizer, first.names, average, first.weights, union(each)))
    return Record(steps, ranks[0].calls, joined=True, horovod=True, last_bit=ranks[0].last_bit)


@dataclass(frozen=True)
class Deviation:
    """A variable whose gradient, update or value isn't that of one process."""

    step: int  # from 1
    kind: str  # GRADIENT, UPDATE, or STATE for the value of a variable that no optimizer trains
    variable: str
    ratio: float | None  # the multiple of that of one process; None if it points elsewhere
    off: float  # the difference, relative to the norm of one process
    allowed: float  # what rounding explains


def union(steps: Sequence[Step]) -> Counter[int]:
    """Return the rows of all ranks' batches in one step."""
    return sum((step.rows for step in steps), Counter())


def compare(one: Record, again: Record, other: Record) -> list[Deviation]:
    """Return where a rank differs from one process, which ran once more with changed inputs."""
    found = []
    for number, steps in enumerate(zip(one.steps, again.steps, other.steps)):
        first = steps[0]
        least = max(_LEAST if first.rows and one is not again else _LEAST_UNPERTURBED, one.last_bit)
        # An update is what is left when rounded weights are subtracted.
        rounding = _ROUNDINGS * np.linalg.norm(first.weights, axis=1)
        for kind, names, arrays in (
            (GRADIENT, first.names, [step.gradients for step in steps]),
            (UPDATE, first.names, [record.update(number) for record in (one, again, other)]),
            (STATE, first.names[first.trained :], [step.weights[first.trained :] for step in steps]),
        ):
            if len({array.shape for array in arrays}) == 1:
                floor = _LEAST * float(np.nanmax(np.abs(arrays[0]), initial=0))
                common = 0.0 if kind == STATE else _TIMES_ROUNDING * _moved_by_most(*arrays[:2])
                for name, more, *values in zip(names, rounding if kind == UPDATE else 0 * rounding, *arrays):
                    found += deviation(number + 1, kind, name, values, least + common, floor, more)
    return found


def _moved_by_most(one: np.ndarray, again: np.ndarray) -> float:
    """Return by which part of their norm most variables have moved: sums of many terms, and Adam's update of a gradient
    near 0, are rounded in other variables than the perturbed run shows.
    """
    moved = np.linalg.norm(again - one, axis=1) / (np.linalg.norm(one, axis=1) + 1e-30)
    return float(np.quantile(np.nan_to_num(moved), _MOST)) if len(moved) else 0.0


def deviation(
    step: int,
    kind: str,
    name: str,
    values: Sequence[np.ndarray],
    least: float = _LEAST,
    floor: float = 0.0,
    rounding: float = 0.0,
) -> list[Deviation]:
    """Return what differs between the values of one process, of the same with changed inputs, and of a rank.

    Allowed are, relative to a norm of at least ``floor``, ``least`` and what the changed inputs do; and ``rounding``.
    """
    one, again, other = values
    if np.isnan(one).all() and np.isnan(other).all():
        return []
    size = max(float(np.linalg.norm(one)), floor + 1e-30)
    allowed = _TIMES_ROUNDING * float(np.linalg.norm(again - one)) / size + least + rounding / size
    off = float(np.linalg.norm(other - one)) / size
    if off <= allowed:
        return []
    ratio = float(np.dot(other, one) / max(np.dot(one, one), 1e-60))
    rest = float(np.linalg.norm(other - ratio * one)) / max(abs(ratio) * size, 1e-30)
    is_multiple = rest <= max(_PURE, allowed) and abs(ratio - 1) > _PURE
    return [Deviation(step, kind, name, ratio if is_multiple else None, off, allowed)]


def equal(first: np.ndarray, second: np.ndarray) -> bool:
    """Return True if projections of the same tensors are equal but for rounding."""
    if first.shape != second.shape:
        return False
    return bool(np.allclose(first, second, rtol=1e-4, atol=1e-12, equal_nan=True))
