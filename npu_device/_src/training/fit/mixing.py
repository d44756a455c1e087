"""Finds in the graph of a step what mixes the samples of a batch, and the user's lines that do: where values of several
samples meet, where gradients are changed before they are reduced, where weights are set by gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from npu_device._src import compat
from npu_device._src.comparison.trial import Trial
from npu_device._src.training.fit.graph_lines import where

_TAPE = "gradient_tape/"  # prefix of the names of operations that a tape has made
_NOT_LINEAR = "ClipByValue L2Loss Maximum Minimum Pow Rsqrt Sign Sqrt Square SquaredDifference Tanh"
_MOST_TENSORS = 3000
_MOST_FETCHED_ELEMENTS = 4096  # most elements of a vector that is fetched


def setters_of(handle: Any, graph: Any) -> list:
    """Return the operations of a graph that set a variable, by its handle outside."""
    captured = [inner for outer, inner in graph.captures if outer is handle]
    users = [user for inner in captured for user in inner.consumers()]
    return [user for user in users if user.type.startswith("Assign")]


def is_of_gradients(operation: Any) -> bool:
    """Return True if an operation works on what a tape has computed."""
    sources = compat.tensors_behind(operation.inputs)
    return any(_is_by_tape(tensor.op) for tensor in sources)


def _is_by_tape(operation: Any) -> bool:
    return bool(operation.name.startswith(_TAPE))


def line_that_moves(variables: Sequence, graph: Any) -> str | None:
    """Return the line at which a step sets a weight by gradients of its samples before it computes others, or None."""
    for variable in variables:
        for setter in setters_of(compat.handle_of(variable), graph):
            if is_of_gradients(setter):
                return where(setter) or setter.name
    return None


def line_that_clips(gradients: Sequence, reduced: Sequence) -> str | None:
    """Return the line at which a step changes gradients that it hasn't reduced in a way that isn't linear, or None."""
    reduced_ids = set(map(id, tf.nest.flatten(reduced, expand_composites=True)))
    tensors = tf.nest.flatten(gradients, expand_composites=True)

    def is_reduced(tensor: Any) -> bool:
        return id(tensor) in reduced_ids

    def is_reduced_or_by_tape(tensor: Any) -> bool:
        return is_reduced(tensor) or _is_by_tape(tensor.op)

    behind = compat.tensors_behind(tensors, is_reduced_or_by_tape)
    suspects = {
        tensor.op.name: tensor.op for tensor in behind if tensor.op.type in _NOT_LINEAR.split()
    }
    # The fewer scopes an operation is in, the nearer it is to the line of the script.
    for name in sorted(suspects, key=len):
        suspect = suspects[name]
        sources = compat.tensors_behind(suspect.inputs, is_reduced)
        if any(_is_by_tape(source.op) for source in sources):
            return where(suspect) or name
    return None


def values_of_samples(graph: Any) -> list:
    """Return the tensors of a graph that may hold a value for each sample, and small ones that may be made of those, in
    the order in which they were created; without what is computed of gradients only to apply them.
    """
    operations = graph.get_operations()
    inputs_of_tapes = []
    for operation in filter(_is_by_tape, operations):
        inputs_of_tapes += operation.inputs
    used = {tensor.op.name for tensor in compat.tensors_behind(inputs_of_tapes)}
    of_gradients = set[str]()
    tensors: list = []
    for operation in operations:
        sources = {tensor.op.name for tensor in operation.inputs}
        if _is_by_tape(operation) or sources & of_gradients:
            of_gradients.add(operation.name)
        is_used = operation.name in used
        # Values without gradients count if they are computed of used ones, such as the loss.
        is_beside = bool(sources & used) and operation.name not in of_gradients
        if not _is_by_tape(operation) and (is_used or is_beside):
            tensors += filter(_may_be_of_samples, operation.outputs)
    # Values of every tensor are fetched, and a large model has tens of thousands.
    return tensors[:_MOST_TENSORS]


def _may_be_of_samples(tensor: Any) -> bool:
    rank = tensor.shape.rank
    if not tensor.dtype.is_floating or rank is None:
        return False
    if rank == 0 or tensor.shape[0] is None:
        return True
    return bool(rank == 1 and tensor.shape[0] <= _MOST_FETCHED_ELEMENTS)


@dataclass(frozen=True)
class MixingPoint:
    """Where a value of a step first depends on several samples."""

    text: str  # the operation, and its line
    is_of_a_sample: bool  # the value belongs to a sample, and other samples change it


def where_samples_meet(
    tensors: Sequence,
    whole: Sequence[np.ndarray],
    parts: Sequence[Sequence[np.ndarray]],
    rows: Sequence[int],
) -> MixingPoint | None:
    """Return where a value first depends on several samples, unlike a mean or sum.

    Args:
        tensors: as ``values_of_samples`` returns them.
        whole: their values for all samples.
        parts: their values for each part of the samples.
        rows: the number of samples in each part.
    """
    weights = [count / sum(rows) for count in rows]
    small = []
    for tensor, value, *values_of_parts in zip(tensors, whole, *parts):
        if not _is_per_sample(tensor):
            wide = [part.astype(np.float64) for part in values_of_parts]
            trial = Trial(value, [], wide, weights)
            small.append((tensor, trial))
        elif not _is_joined(value, values_of_parts, rows):
            # A loss of Keras multiplies the value of each sample by one over the number of valid steps.
            is_of_a_sample = not compat.is_of_loss_reduction(tensor.op)
            return MixingPoint(_described(tensor.op), is_of_a_sample)
    added_up = {tensor.op.name for tensor, trial in small if _is_added_up(trial)}
    for tensor, _ in small:
        # A quotient by a number of samples, for instance, makes a mean of a sum.
        users = {user.name for user in tensor.consumers()}
        if added_up.isdisjoint([tensor.op.name, *users]):
            return MixingPoint(_described(tensor.op), is_of_a_sample=False)
    return None


def _is_per_sample(tensor: Any) -> bool:
    return bool(tensor.shape.rank) and tensor.shape[0] is None


def _described(operation: Any) -> str:
    texts = (operation.name, where(operation))
    return ", ".join(filter(None, texts))


def _is_added_up(trial: Trial) -> bool:
    """Return whether a value is the same for all samples, or the mean or the sum over the parts."""
    whole = trial.whole
    expected = (trial.mean_of_parts, trial.sum_of_parts, trial.parts[0])
    return any(np.allclose(whole, array, rtol=1e-3, atol=1e-6) for array in expected)


def _is_joined(whole: np.ndarray, parts: Sequence[np.ndarray], rows: Sequence[int]) -> bool:
    """Return whether the values for all samples are those for the parts, one after the other."""
    if any(part.shape[1:] != whole.shape[1:] for part in parts):
        return False
    if len(whole) != sum(map(len, parts)):
        # The first axis isn't samples, so nothing can be told.
        return True
    orders = [np.concatenate(parts)]
    views = len(whole) // sum(rows)
    lengths = [views * count for count in rows]
    if views > 1 and list(map(len, parts)) == lengths:
        # The parts may be several views of the batch, one after the other, of which each has all samples.
        split = []
        for part, count in zip(parts, rows):
            split.append(part.reshape(views, count, *whole.shape[1:]))
        in_views = np.concatenate(split, axis=1)
        orders.append(in_views.reshape(whole.shape))
    wide = whole.astype(np.float64)
    largest = np.max(np.abs(wide), initial=0.0)
    allowed = 1e-3 * float(largest) + 1e-9
    return any(np.all(np.abs(wide - order) <= allowed) for order in orders)
