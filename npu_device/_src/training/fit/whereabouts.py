"""The user's lines behind what the first-step check finds in a traced step."""

from __future__ import annotations

import linecache
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from npu_device._src.cluster.tracebacks import is_users

_TAPE = "gradient_tape/"  # before the name of an operation that a tape has made
_NOT_LINEAR = {
    "ClipByValue", "L2Loss", "Maximum", "Minimum", "Pow", "Rsqrt", "Sign", "Sqrt", "Square", "SquaredDifference",
    "Tanh",
}  # fmt: skip
_MOST = 3000


def clipping(gradients: Sequence[Any], reduced: Sequence[Any]) -> str | None:
    """Return the line at which gradients are clipped, or changed in another way that isn't linear, after the tape has
    computed them and before an optimizer gets them; None if nowhere, or after the step has reduced them itself.
    """
    done = {id(part) for value in reduced for part in tf.nest.flatten(value, expand_composites=True)}
    parts = [part for gradient in gradients for part in tf.nest.flatten(gradient, expand_composites=True)]
    suspects: dict[str, Any] = {}
    seen: set[str] = set()
    waiting = [part for part in parts if id(part) not in done]
    while waiting:
        operation = waiting.pop().op
        if operation.name in seen or operation.name.startswith(_TAPE):
            continue
        seen.add(operation.name)
        if operation.type in _NOT_LINEAR:
            suspects[operation.name] = operation
        waiting += [given for given in operation.inputs if id(given) not in done]
    for suspect in sorted(suspects.values(), key=lambda operation: len(operation.name)):
        if _is_of_gradients(suspect, done):
            return where(suspect) or suspect.name
    return None


def _is_of_gradients(operation: Any, done: set[int]) -> bool:
    waiting, seen = [operation], {operation.name}
    while waiting:
        for given in waiting.pop().inputs:
            if given.op.name.startswith(_TAPE):
                return True
            if id(given) not in done and given.op.name not in seen:
                seen.add(given.op.name)
                waiting.append(given.op)
    return False


def values_per_sample(graph: Any) -> list[Any]:
    """Return the tensors of a graph that may hold a value for each sample, in the order in which they were made."""
    return [
        output
        for operation in graph.get_operations()
        if not operation.name.startswith(_TAPE) and operation.type != "AddN"  # by which a tape adds up gradients
        for output in operation.outputs
        if output.dtype.is_floating and output.shape.rank and output.shape[0] is None
    ][:_MOST]


def where_samples_meet(
    tensors: Sequence[Any], whole: Sequence[np.ndarray], parts: Sequence[Sequence[np.ndarray]], rows: Sequence[int]
) -> str | None:
    """Return the operation, and its line, at which the values of a sample first depend on the other samples, given the
    values of ``values_per_sample`` for all samples and for each part.
    """
    for place, tensor in enumerate(tensors):
        if not _are_the_same(whole[place], [part[place] for part in parts], rows):
            line = where(tensor.op)
            return f"{tensor.op.name}{', ' + line if line else ''}"
    return None


def _are_the_same(whole: np.ndarray, parts: Sequence[np.ndarray], rows: Sequence[int]) -> bool:
    if any(part.shape[1:] != whole.shape[1:] for part in parts):
        return False
    if len(whole) != sum(map(len, parts)):
        return True  # its first axis isn't samples
    ways = [np.concatenate(parts)]
    views = len(whole) // sum(rows)
    if views > 1 and [len(each) for each in (whole, *parts)] == [views * count for count in (sum(rows), *rows)]:
        # of each sample, one after the other
        each = [part.reshape(views, count, *whole.shape[1:]) for part, count in zip(parts, rows)]
        ways.append(np.concatenate(each, axis=1).reshape(whole.shape))
    wide = whole.astype(np.float64)
    size = 1e-3 * float(np.max(np.abs(wide), initial=0.0)) + 1e-9
    return any(bool(np.all(np.abs(wide - way.astype(np.float64)) <= size)) for way in ways)


def where(operation: tf.Operation) -> str:
    """Return the user's line that made an operation, in words; "" if there is none."""
    frames = [frame for frame in operation.traceback if is_users(frame.filename)]
    if not frames:
        return ""
    name, number = frames[-1].filename, frames[-1].lineno
    return f"{name}, line {number}: {linecache.getline(name, number).strip()}"
