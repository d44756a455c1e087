"""What a process that is compared keeps of its steps, and what of it isn't as in one process: gradients, updates,
other variables. Numpy only.

The tolerance isn't a constant: what moves when the inputs of the single process change in their last bit is rounding.
"""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from npu_device._src.comparison.trial import TIMES_ROUNDING, Trial
from npu_device._src.whole_files import write_whole

PROJECTIONS = 12  # kept of a tensor
# What is compared of a variable.
GRADIENT = "gradient"
UPDATE = "update"
STATE = "state"  # the value of a variable that no optimizer trains

_FILE = "record.pickle"
# Fraction of a tensor's norm: float32's own rounding in sums of a few hundred terms.
_TOLERANCE = 1e-6
# The tolerance for sessions, whose inputs aren't changed, and for averages, which may travel in 16 bits.
_TOLERANCE_UNPERTURBED = 1e-3
_ROUNDINGS = 4 * 2.0**-23  # fraction of the norm of the weights: float32 rounds them at each update
# Changes that this fraction of the variables stays below are allowed in all of them.
_MAJORITY = 0.75
# A tensor counts as a multiple of the single process's if, after scaling, less than this fraction of the norm is left.
_PURE = 0.1
# If a change of inputs in the last bit moves a tensor by this fraction of its norm, the tensor is mere rounding.
_ALL_ROUNDING = 0.01


def _no_tensors() -> np.ndarray:
    return np.zeros([0, PROJECTIONS])


@dataclass
class RecordedStep:
    """A step of an optimizer in one process."""

    optimizer: str = ""
    optimizer_step: int = (
        0  # number among the optimizer's steps, from 1; not all of them are recorded
    )
    phase: str = ""  # the optimizer's class, and the line that trains
    # Names of the variables: first the trained ones, then the others.
    names: Sequence[str] = ()
    # A row of projections for each variable that is trained.
    gradients: np.ndarray = field(default_factory=_no_tensors)
    # Projections of all variables before the step.
    weights: np.ndarray = field(default_factory=_no_tensors)
    # Digests of the samples that were read since the previous step.
    rows: Counter[int] = field(default_factory=Counter)
    # Sums of what tapes gave since the previous step, by the number of gradients; only with Horovod's names.
    tape_gradients: dict[int, np.ndarray] = field(default_factory=dict)
    logs: dict[str, float] = field(default_factory=dict)  # what the script sees of the step

    @property
    def trained(self) -> int:
        """Return the number of variables that are trained."""
        return len(self.gradients)

    @property
    def trained_names(self) -> Sequence[str]:
        """Return the names of the variables that are trained."""
        return self.names[: self.trained]


@dataclass(frozen=True)
class RecordedCall:
    """A call of the script that may explain a difference."""

    topic: str
    line: str
    detail: str = ""
    outcome: Any = None  # result of the call, which may have to be the same on all processes

    def __str__(self) -> str:
        return ", ".join(filter(None, (self.detail, self.line)))


@dataclass
class Record:
    """What one process leaves."""

    steps: list[RecordedStep] = field(default_factory=list)
    calls: list[RecordedCall] = field(default_factory=list)
    # The calls that led to any step of an optimizer, by its name: each since the step before, of any optimizer.
    calls_before: dict[str, list[RecordedCall]] = field(default_factory=dict)
    # Lines that train or evaluate, with their callers.
    trained_at: set[str] = field(default_factory=set)
    ended_at: str = ""  # the line where the limit of time ended the script
    # Lines that would have trained or evaluated after that.
    unreached: list[str] = field(default_factory=list)
    metrics: set[str] = field(default_factory=set)  # names of the metrics of models in ``fit``
    joined: bool = False  # the process was a rank of a job
    uses_horovod: bool = False  # the script uses Horovod's names
    last_bit: float = 0.0  # last bit of the coarsest dtype in which its models compute

    def of(self, topic: str) -> list[RecordedCall]:
        """Return the calls on a topic."""
        return [call for call in self.calls if call.topic == topic]

    def successor(self, index: int) -> int | None:
        """Return the index of the step that follows one, of the same optimizer and variables; None if unknown."""
        step = self.steps[index]
        following = (step.optimizer, step.optimizer_step + 1, step.names)
        keys = [(step.optimizer, step.optimizer_step, step.names) for step in self.steps]
        if following not in keys:
            return None
        return keys.index(following)

    def update(self, index: int) -> np.ndarray:
        """Return what a step has added to the weights that are trained; nothing if that isn't known."""
        step = self.steps[index]
        successor = self.successor(index)
        if successor is None:
            return _no_tensors()
        return (self.steps[successor].weights - step.weights)[: step.trained]

    def save(self, folder: Path) -> None:
        """Write the record, which can be read even if this process is killed meanwhile."""
        write_whole(folder / _FILE, pickle.dumps(self))


def load(folder: Path) -> Record:
    """Return the record of a process; one without steps if it has left none."""
    path = folder / _FILE
    if not path.exists():
        return Record()
    return pickle.loads(path.read_bytes())


def aligned(records: Sequence[Record]) -> list[Record]:
    """Return records with the steps that all of them have, each optimizer's in their order."""
    # Steps are matched by optimizer: optimizers may take turns in a different order on a rank, once each of them has
    # made its first step, by which it is named.
    steps_of_records = []
    for record in records:
        counts = Counter[str]()
        steps = {}
        for step in record.steps:
            steps[step.optimizer, counts[step.optimizer]] = step
            counts[step.optimizer] += 1
        steps_of_records.append(steps)
    common = [key for key in steps_of_records[0] if all(key in steps for steps in steps_of_records)]
    return [
        replace(record, steps=[steps[key] for key in common])
        for record, steps in zip(records, steps_of_records)
    ]


def average_of(ranks: Sequence[Record]) -> Record:
    """Return what stands for one process where ranks can't equal it: their samples, and the average of the gradients
    that each has computed.
    """
    steps = []
    for steps_of_ranks in zip(*(record.steps for record in aligned(ranks))):
        step = steps_of_ranks[0]
        computed = [step.tape_gradients.get(step.trained) for step in steps_of_ranks]
        gradients = [array for array in computed if array is not None]
        average = step.gradients
        shapes = {array.shape for array in gradients}
        # If a rank has computed none, it has taken its gradients from somewhere else. If it trains more variables, or
        # fewer, there is no average.
        if len(gradients) == len(steps_of_ranks) and len(shapes) == 1:
            average = np.mean(gradients, axis=0)
        steps.append(replace(step, gradients=average, rows=union(steps_of_ranks)))
    return replace(ranks[0], steps=steps)


class Triple(NamedTuple):
    """What is compared: of one process, of the same with perturbed inputs, and of a rank."""

    single: Any
    perturbed: Any
    rank: Any


@dataclass(frozen=True)
class Deviation:
    """A variable whose gradient, update or value isn't that of one process."""

    variable: str
    # Factor between the rank's tensor and the single process's; None if it isn't scaled, or by less than a tenth.
    ratio: float | None
    # The norm of the difference, divided by the norm of one process's value.
    relative_error: float
    allowed: float  # the largest relative error that rounding explains


def union(steps: Sequence[RecordedStep]) -> Counter[int]:
    """Return the rows of all ranks' batches in one step."""
    return sum((step.rows for step in steps), Counter())


def compare(
    single: Record, perturbed: Record, rank: Record
) -> Iterator[dict[str, list[Deviation]]]:
    """Yield of each step where a rank differs from one process, which also ran with perturbed inputs, by quantity.

    Where the perturbed inputs move a gradient by ``change``, the distance between rank and process may be::

        (tolerance + _rounding_of_most(changes of all tensors)) * norm + TIMES_ROUNDING * change

    Updates may differ by more, and state by the tolerance and ``change`` only.
    """
    records = Triple(single, perturbed, rank)
    for index, steps in enumerate(zip(*(record.steps for record in records))):
        step = steps[0]
        trained = step.trained
        tolerance = _tolerance(single, step)
        gradients = Triple(*(recorded.gradients for recorded in steps))
        changes = _changes(gradients)
        allowed_gradient_errors = tolerance + _rounding_of_most(changes, tolerance)
        updates = Triple(*(record.update(index) for record in records))
        # Optimizers such as Adam turn a gradient that is rounding into an update of full size.
        allowed_update_errors = tolerance + TIMES_ROUNDING * changes
        allowed_update_errors += _rounding_of_most(_changes(updates), tolerance)
        # An update is what is left when rounded weights are subtracted.
        absolute_errors = _ROUNDINGS * np.linalg.norm(step.weights[:trained], axis=1)
        states = Triple(*(recorded.weights[trained:] for recorded in steps))
        yield {
            GRADIENT: _deviations(step.trained_names, gradients, allowed_gradient_errors),
            UPDATE: _deviations(
                step.trained_names, updates, allowed_update_errors, absolute_errors
            ),
            STATE: _deviations(step.names[trained:], states, tolerance),
        }


def _tolerance(record: Record, step: RecordedStep) -> float:
    """Return the fraction of the norm of a tensor that it may differ by, besides what perturbed inputs do."""
    tolerance = _TOLERANCE
    if not step.rows or record.uses_horovod:
        tolerance = _TOLERANCE_UNPERTURBED
    return max(tolerance, record.last_bit)


def _most_rounding(tolerance: float) -> float:
    """Return the relative change of a tensor from which on it is rounding altogether, or another tensor."""
    return max(_ALL_ROUNDING, TIMES_ROUNDING * tolerance)


def typical_change(step: RecordedStep, perturbed: RecordedStep) -> float:
    """Return how far perturbed inputs move the gradients of a step, relative to their norms: the median of those that
    they move.
    """
    changes = _changes(Triple(step.gradients, perturbed.gradients, None))
    moved = changes[changes > 0]
    if not len(moved):
        return 0.0
    return float(np.median(moved))


def differ_by_rounding(record: Record, step: RecordedStep, perturbed: RecordedStep) -> bool:
    """Return True if rounding explains what perturbed inputs do to most gradients of a step."""
    if step.trained != perturbed.trained:
        return False
    return typical_change(step, perturbed) <= _most_rounding(_tolerance(record, step))


def _deviations(
    names: Sequence[str],
    arrays: Triple,
    tolerance: float | np.ndarray,
    absolute: float | np.ndarray = 0.0,
) -> list[Deviation]:
    """Return the deviations of a quantity: ``arrays`` with a row for each variable.

    ``tolerance`` is relative to the norm; an array of tolerances has a number for each variable.
    """
    # Arrays of different shapes can't be compared: an update shows only if another step follows, which not all of the
    # three may have, and ranks may have variables that aren't trained of their own. ``ComparedRun`` compares the number
    # of trained ones.
    if len({array.shape for array in arrays}) > 1:
        return []
    floor = _TOLERANCE * float(np.nanmax(np.abs(arrays.single), initial=0))
    tolerances = np.broadcast_to(tolerance, len(names))
    absolutes = np.broadcast_to(absolute, len(names))
    deviations = []
    for name, relative, distance, *tensors in zip(names, tolerances, absolutes, *arrays):
        tensor = Triple(*tensors)
        deviations += deviation(name, tensor, relative, floor, distance)
    return deviations


def _changes(arrays: Triple) -> np.ndarray:
    """Return how far perturbed inputs move each tensor, relative to its norm; 0 where that isn't known."""
    single, perturbed, _ = arrays
    if single.shape != perturbed.shape:
        return np.zeros(len(single))
    norms = np.linalg.norm(single, axis=1) + 1e-30
    return np.nan_to_num(np.linalg.norm(perturbed - single, axis=1) / norms, posinf=1.0)


def _rounding_of_most(changes: np.ndarray, tolerance: float) -> float:
    """Return the relative rounding to allow in each variable: a multiple of what most of them stay below.

    Sums of many terms, and Adam's update of a gradient near 0, are rounded in other variables than the perturbed run
    shows. What is rounding altogether, such as the gradient of a bias before batch normalization, has a large
    tolerance itself, and says nothing of the other variables.
    """
    partial = changes[changes < _most_rounding(tolerance)]
    if not len(partial):
        return 0.0
    return TIMES_ROUNDING * float(np.quantile(partial, _MAJORITY, method="lower"))


def deviation(
    name: str,
    tensor: Triple,
    tolerance: float = _TOLERANCE,
    floor: float = 0.0,
    absolute: float = 0.0,
) -> list[Deviation]:
    """Return the deviation of a tensor, given as projections; nothing if rounding explains it.

    Allowed are, relative to a norm of at least ``floor``, ``tolerance`` and what the perturbed inputs do; and
    ``absolute``.
    """
    single, perturbed, rank = tensor
    if np.isnan(single).all() and np.isnan(rank).all():
        return []
    trial = Trial(single, [perturbed])
    size = max(trial.size, floor + 1e-30)
    allowed = trial.allowed(0.0, tolerance * size + absolute)
    distance = trial.distance(rank)
    if distance <= allowed:
        return []
    # The multiple of the single process's tensor that is nearest to the rank's.
    ratio = float(np.dot(rank, single) / max(np.dot(single, single), 1e-60))
    remainder = float(np.linalg.norm(rank - ratio * single)) / max(abs(ratio) * size, 1e-30)
    multiple = None
    # The tensor is that of one process, scaled: by the number of ranks, perhaps.
    if remainder <= max(_PURE, allowed / size) and abs(ratio - 1) > _PURE:
        multiple = ratio
    return [Deviation(name, multiple, distance / size, allowed / size)]


def equal(projections: np.ndarray, expected: np.ndarray) -> bool:
    """Return True if projections of the same tensors are equal but for rounding."""
    if projections.shape != expected.shape:
        return False
    return bool(np.allclose(projections, expected, rtol=1e-4, atol=1e-12, equal_nan=True))
