"""What a process that is compared keeps of its steps, and what of it isn't as in one process: gradients, updates,
other variables. Numpy only.

The tolerance isn't a constant: what moves when the inputs of the single process change in their last bit is rounding.
"""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

PROJECTIONS = 12  # kept of a tensor
# What is compared of a variable.
GRADIENT = "gradient"
UPDATE = "update"
STATE = "state"

_FILE = "record.pickle"
_TIMES_ROUNDING = (
    30.0  # of what the perturbed run moves; sums over ranks are rounded more often than once
)
_TOLERANCE = 1e-6  # of a tensor's norm: float32's own rounding in sums of a few hundred terms
_TOLERANCE_UNPERTURBED = (
    1e-3  # of sessions, whose inputs aren't changed, and of averages, that may travel in 16 bits
)
_ROUNDINGS = 4 * 2.0**-23  # of the norm of the weights: float32 rounds them at each update
_MAJORITY = 0.75  # of the variables; what moves these may move any
_PURE = 0.1  # of a tensor's norm: less is left when the other run's is scaled, so it is a multiple


def _no_tensors() -> np.ndarray:
    return np.zeros([0, PROJECTIONS])


@dataclass
class RecordedStep:
    """A step of an optimizer in one process."""

    optimizer: str = ""
    number: int = 0  # of the optimizer's steps, from 1; not all of them are recorded
    phase: str = ""  # the optimizer's class, and the line that trains
    names: Sequence[
        str
    ] = ()  # of the variables: those that are trained, then those that no optimizer trains
    gradients: np.ndarray = field(
        default_factory=_no_tensors
    )  # a row of projections for each one that is trained
    weights: np.ndarray = field(default_factory=_no_tensors)  # of all before the step
    rows: Counter[int] = field(
        default_factory=Counter
    )  # the samples that were read since the step before
    own: dict[int, np.ndarray] = field(
        default_factory=dict
    )  # sums of what tapes gave since then, with Horovod's names
    logs: dict[str, float] = field(default_factory=dict)  # what the script sees of the step

    @property
    def trained(self) -> int:
        """Return the number of variables that are trained."""
        return len(self.gradients)


@dataclass(frozen=True)
class RecordedCall:
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

    steps: list[RecordedStep] = field(default_factory=list)
    calls: list[RecordedCall] = field(default_factory=list)
    # Calls between two steps, by the optimizer of the second.
    calls_before: dict[str, list[RecordedCall]] = field(default_factory=dict)
    trained_at: set[str] = field(
        default_factory=set
    )  # lines that train, with those that called them
    ended_at: str = ""  # the line where the limit of time ended the script
    unreached: list[str] = field(default_factory=list)  # lines that would have trained after that
    metrics: set[str] = field(default_factory=set)  # names of those of the models in ``fit``
    joined: bool = False  # it was a rank of a job
    horovod: bool = False  # by Horovod's names
    last_bit: float = 0.0  # of the dtype in which its models compute

    def of(self, kind: str) -> list[RecordedCall]:
        """Return the calls of a kind."""
        return [call for call in self.calls if call.kind == kind]

    def successor(self, index: int) -> int | None:
        """Return the index of the step that follows one, of the same optimizer and variables; None if unknown."""
        step = self.steps[index]
        following = (step.optimizer, step.number + 1, step.names)
        keys = [(step.optimizer, step.number, step.names) for step in self.steps]
        return keys.index(following) if following in keys else None

    def update(self, index: int) -> np.ndarray:
        """Return what a step has added to the weights that are trained; nothing if that isn't known."""
        step = self.steps[index]
        successor = self.successor(index)
        if successor is None:
            return _no_tensors()
        return (self.steps[successor].weights - step.weights)[: step.trained]

    def save(self, folder: Path) -> None:
        """Write the record; others see all of it or none."""
        draft = folder / f"{_FILE}.part"
        draft.write_bytes(pickle.dumps(self))
        draft.replace(folder / _FILE)


def exists(folder: Path) -> bool:
    """Return True if a process has left its record."""
    return (folder / _FILE).exists()


def load(folder: Path) -> Record:
    """Return the record of a process."""
    record: Record = pickle.loads((folder / _FILE).read_bytes())
    return record


def aligned(records: Sequence[Record]) -> list[Record]:
    """Return records with the steps that all of them have, each optimizer's in their order."""
    tables = []
    for record in records:
        counts: Counter[str] = Counter()
        steps = {}
        for step in record.steps:
            steps[step.optimizer, counts[step.optimizer]] = step
            counts[step.optimizer] += 1
        tables.append(steps)
    common = [key for key in tables[0] if all(key in steps for steps in tables)]
    return [
        replace(record, steps=[steps[key] for key in common])
        for record, steps in zip(records, tables)
    ]


def average_of(ranks: Sequence[Record]) -> Record:
    """Return what stands for one process where ranks can't equal it: their samples, and the average of the gradients
    that each has computed.
    """
    steps = []
    for steps_of_ranks in zip(*(record.steps for record in ranks)):
        step = steps_of_ranks[0]
        computed = [step.own.get(step.trained) for step in steps_of_ranks]
        gradients = [array for array in computed if array is not None]
        average = step.gradients
        if len(gradients) == len(
            steps_of_ranks
        ):  # else a rank has taken its gradients from somewhere else
            average = np.mean(gradients, axis=0)
        steps.append(replace(step, gradients=average, rows=union(steps_of_ranks)))
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


def union(steps: Sequence[RecordedStep]) -> Counter[int]:
    """Return the rows of all ranks' batches in one step."""
    return sum((step.rows for step in steps), Counter())


def compare(single: Record, perturbed: Record, rank: Record) -> list[Deviation]:
    """Return where a rank differs from one process, which ran once more with changed inputs."""
    deviations = []
    for number, steps in enumerate(zip(single.steps, perturbed.steps, rank.steps)):
        step = steps[0]
        tolerance = _TOLERANCE
        if not step.rows or single is perturbed:
            tolerance = _TOLERANCE_UNPERTURBED
        tolerance = max(tolerance, single.last_bit)
        # An update is what is left when rounded weights are subtracted.
        rounding = _ROUNDINGS * np.linalg.norm(step.weights, axis=1)
        unrounded = 0 * rounding
        gradients = [step.gradients for step in steps]
        deviations += _deviations(number, GRADIENT, step.names, gradients, tolerance, unrounded)
        updates = [record.update(number) for record in (single, perturbed, rank)]
        deviations += _deviations(number, UPDATE, step.names, updates, tolerance, rounding)
        state = [inner.weights[step.trained :] for inner in steps]
        deviations += _deviations(
            number, STATE, step.names[step.trained :], state, tolerance, unrounded
        )
    return deviations


def _deviations(
    number: int,
    quantity: str,
    names: Sequence[str],
    arrays: Sequence[np.ndarray],
    tolerance: float,
    rounding: np.ndarray,
) -> list[Deviation]:
    """Return the deviations of a quantity in a step; ``arrays`` are of one process, of it perturbed, and of a rank."""
    if len({array.shape for array in arrays}) > 1:  # another script, or an update that isn't known
        return []
    floor = _TOLERANCE * float(np.nanmax(np.abs(arrays[0]), initial=0))
    if quantity != STATE:
        tolerance += _TIMES_ROUNDING * _typical_change(*arrays[:2])
    deviations = []
    for name, rounding_of_variable, *projections in zip(names, rounding, *arrays):
        deviations += deviation(
            number + 1, quantity, name, projections, tolerance, floor, rounding_of_variable
        )
    return deviations


def _typical_change(single: np.ndarray, perturbed: np.ndarray) -> float:
    """Return by which part of their norm most variables have moved: sums of many terms, and Adam's update of a gradient
    near 0, are rounded in other variables than the perturbed run shows.
    """
    norms = np.linalg.norm(single, axis=1) + 1e-30
    changes = np.linalg.norm(perturbed - single, axis=1) / norms
    if not len(changes):
        return 0.0
    return float(np.quantile(np.nan_to_num(changes), _MAJORITY))


def deviation(
    step: int,
    quantity: str,
    name: str,
    projections: Sequence[np.ndarray],
    tolerance: float = _TOLERANCE,
    floor: float = 0.0,
    rounding: float = 0.0,
) -> list[Deviation]:
    """Return what differs between a tensor of one process, of the same with changed inputs, and of a rank.

    Allowed are, relative to a norm of at least ``floor``, ``tolerance`` and what the changed inputs do; and
    ``rounding``.
    """
    single, perturbed, rank = projections
    if np.isnan(single).all() and np.isnan(rank).all():
        return []
    norm = max(float(np.linalg.norm(single)), floor + 1e-30)
    perturbation = float(np.linalg.norm(perturbed - single)) / norm
    allowed = _TIMES_ROUNDING * perturbation + tolerance + rounding / norm
    off = float(np.linalg.norm(rank - single)) / norm
    if off <= allowed:
        return []
    ratio = float(np.dot(rank, single) / max(np.dot(single, single), 1e-60))
    is_multiple = _is_multiple(rank, single, ratio, norm, allowed)
    return [Deviation(step, quantity, name, ratio if is_multiple else None, off, allowed)]


def _is_multiple(
    rank: np.ndarray, single: np.ndarray, ratio: float, norm: float, allowed: float
) -> bool:
    """Return True if a tensor is that of one process, scaled: by the number of ranks, perhaps."""
    remainder = float(np.linalg.norm(rank - ratio * single)) / max(abs(ratio) * norm, 1e-30)
    return remainder <= max(_PURE, allowed) and abs(ratio - 1) > _PURE


def equal(projections: np.ndarray, expected: np.ndarray) -> bool:
    """Return True if projections of the same tensors are equal but for rounding."""
    if projections.shape != expected.shape:
        return False
    return bool(np.allclose(projections, expected, rtol=1e-4, atol=1e-12, equal_nan=True))
