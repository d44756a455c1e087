"""What the first-step check finds when it compares a step on some samples with the same step on parts of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from npu_device._src.training.fit.rehearsal import Outcome, Rehearsal
from npu_device._src.training.fit.whereabouts import where
from npu_device._src.training.same_variables import variable_name

_SHOWN = 3
_SAFETY = 20  # times what rounding has been seen to change


@dataclass(frozen=True)
class Runs:
    whole: Outcome  # of all samples
    again: Sequence[Outcome]  # of all samples once more, and with weights that differ by rounding
    parts: Sequence[Outcome]
    weights: Sequence[float]  # the parts' fractions of the samples
    tolerance: float  # largest difference that counts as rounding, relative


@dataclass(frozen=True)
class Difference:
    """A gradient that isn't the mean over the parts."""

    name: str  # of its variable
    size: float  # of the difference, relative to the gradient
    is_sum: bool  # it is the sum over the parts


def repeats(first: Outcome, second: Outcome) -> bool:
    pairs = [_dense([one, other]) for one, other in zip(first.gradients, second.gradients)]
    if all(np.array_equal(one, other) for one, other in pairs):
        return True
    size = np.sqrt(sum(_norm(one) ** 2 for one, _ in pairs))
    return all(_norm(one - other) <= 0.01 * (_norm(one) + size) for one, other in pairs)


def is_finite(outcome: Outcome) -> bool:
    dense = [_dense([gradient])[0] for gradient in outcome.gradients]
    is_known = all(bool(np.all(np.isfinite(each))) for each in dense)
    return is_known and (not dense or any(_norm(each) > 0 for each in dense))


def differences(rehearsal: Rehearsal, runs: Runs) -> list[Difference]:
    """Return the gradients that differ, the largest difference first."""
    found, size = [], 0.0
    each = list(zip(runs.whole.gradients, *[run.gradients for run in [*runs.again, *runs.parts]]))
    dense = [_dense(values) for values in each]
    size = float(np.sqrt(sum(_norm(values[0]) ** 2 for values in dense)))
    for variable, values in zip(rehearsal.variables, dense):
        whole, again, parts = values[0], values[1 : 1 + len(runs.again)], values[1 + len(runs.again) :]
        rounding = max(_norm(other - whole) for other in again)
        allowed = runs.tolerance * (_norm(whole) + 0.01 * size) + _SAFETY * rounding
        error = _norm(whole - sum(parts))
        if error > allowed:
            total = sum(part / weight for part, weight in zip(parts, runs.weights))
            is_sum = _norm(whole - total) <= allowed
            found.append(Difference(variable_name(variable), error / (_norm(whole) + 1e-30), is_sum))
    return sorted(found, key=lambda difference: -difference.size)


def added_losses(rehearsal: Rehearsal, runs: Runs) -> tuple[list[str], list[str]]:
    """Return the lines at which layers add losses that are sums over the samples, and others that aren't means."""
    sums: list[str] = []
    others: list[str] = []
    for place, tensor in enumerate(rehearsal.losses):
        whole = float(runs.whole.losses[place])
        parts = [float(run.losses[place]) for run in runs.parts]
        allowed = 10 * runs.tolerance * abs(whole) + _SAFETY * max(abs(run.losses[place] - whole) for run in runs.again)
        if abs(whole - sum(part * weight for part, weight in zip(parts, runs.weights))) > allowed:
            found = sums if abs(whole - sum(parts)) <= allowed else others
            found.append(where(tensor.op) or tensor.op.name)
    return sums, others


@dataclass(frozen=True)
class Change:
    """A variable that the step changes by the samples, so that the ranks' values aren't those of one process."""

    name: str
    line: str  # that changes it; "" if unknown
    is_sum: bool  # its increments are sums over the samples
    is_number: bool  # it is a number, or counts
    is_averaged: bool  # the ranks' increments are averaged; else each rank keeps its own
    is_trained: bool  # it is a trainable weight


def changes(
    rehearsal: Rehearsal, runs: Runs, before: Sequence[np.ndarray], named: dict[int, Any], averaged: set[int]
) -> list[Change]:
    """Return the variables that the step changes in another way than one process would.

    ``before`` has the values before the step. ``named`` has the variables that count, and ``averaged`` those whose
    increments the ranks average, by the ``id`` of their handle.
    """
    found = []
    for place, handle in enumerate(rehearsal.handles):
        if id(handle) not in named:
            continue
        values = [outcome.state[place] for outcome in (runs.whole, *runs.again, *runs.parts)]
        same_shape = all(value.shape == before[place].shape for value in values)
        is_averaged, is_sum, differs = id(handle) in averaged, False, True
        if same_shape:
            start = before[place].astype(np.float64)
            moves = [value.astype(np.float64) - start for value in values]
            whole, again, parts = moves[0], moves[1 : 1 + len(runs.again)], moves[1 + len(runs.again) :]
            rounding = max(_norm(other - whole) for other in again)
            allowed = 10 * runs.tolerance * _norm(whole) + _SAFETY * rounding + 1e-6 * _norm(start)
            mean = sum(part * weight for part, weight in zip(parts, runs.weights))
            wrong = _norm(whole - mean) if is_averaged else max(_norm(whole - part) for part in parts)
            differs, is_sum = wrong > allowed, _norm(whole - sum(parts)) <= allowed
        if differs:
            is_number = not before[place].shape or not np.issubdtype(before[place].dtype, np.floating)
            name, line = variable_name(named[id(handle)]), _setter(rehearsal.graph, handle)
            trains = bool(getattr(named[id(handle)], "trainable", False))
            found.append(Change(name, line, is_sum, is_number, is_averaged, trains))
    return found


def _setter(graph: Any, handle: Any) -> str:
    inner = next(inner for outer, inner in graph.captures if outer is handle)
    lines = [where(user) for user in inner.consumers() if user.type.startswith("Assign")]
    return next((line for line in lines if line), "")


def _dense(values: Sequence[Any]) -> list[np.ndarray]:
    """Return gradients of one variable as arrays of one shape; of tables only the rows that any of them has."""
    if not isinstance(values[0], (tuple, list)):
        return [_wide(value) for value in values]
    rows = np.unique(np.concatenate([np.asarray(indices) for _, indices in values]))
    found = []
    for given, indices in values:
        array = _wide(given)
        dense = np.zeros([len(rows), *array.shape[1:]], array.dtype)
        np.add.at(dense, np.searchsorted(rows, np.asarray(indices)), array)
        found.append(dense)
    return found


def _wide(value: Any) -> np.ndarray:
    array = np.asarray(value)
    return array if array.dtype in (np.float32, np.float64) else array.astype(np.float32)


def _norm(array: Any) -> float:
    return float(np.linalg.norm(np.ravel(array)))
