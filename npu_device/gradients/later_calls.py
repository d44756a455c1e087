"""``fusion=2`` in a ``tf.function``: the calls with one ``fusion_id`` are one collective.

The first call can't know of later ones. Its collective takes one tensor more of each dtype, a door, which is empty
until a later call puts its values in there, and takes its results from there. Values that rest on what the first call
gives, or on something with a state that was made after it, stay outside, or each might wait for the other: such a call
is a collective of its own, with a door for those that follow.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import tensorflow as tf

from npu_device import _compat
from npu_device.gradients.order import producers


class Reduce(Protocol):
    """Reduces a list: each tensor alone, or those of a dtype together."""

    def __call__(self, values: Sequence[Any], alone: bool) -> list[Any]: ...


_READ = "ReadVariableOp"


@dataclass
class _Door:
    """How values come into a collective of a graph after it was made. Everything by name: the graph may go."""

    made_before: int  # operations of the graph when the collective was begun
    operation: str  # lets the values in
    reduced: str  # the tensor of what the values come to
    inside: list[str] = field(default_factory=list)  # flat tensors
    elements: int = 0  # of all of them

    def admits(self, graph: tf.Graph, tensors: Sequence[tf.Tensor]) -> bool:
        """Whether the collective may wait for some tensors."""
        since = set(graph.get_operations()[self.made_before :])
        used = {tensor.name for operation in since if operation.type != _READ for tensor in _resources(operation)}
        waiting = [tensor.op for tensor in tensors]
        seen = set(waiting)
        while waiting:
            operation = waiting.pop()
            if operation not in since:
                continue
            reads = operation.type == _READ and operation.inputs[0].name not in used
            if not reads and (operation.op_def.is_stateful or _resources(operation)):
                return False
            new = [producer for producer in producers(operation) if producer not in seen]
            seen.update(new)
            waiting += new
        return True

    def let_in(self, graph: tf.Graph, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Let the collective take some tensors too; what they come to."""
        flat = [tf.reshape(tensor, [-1]) for tensor in tensors]
        self.inside += [tensor.name for tensor in flat]
        everything = tf.concat([graph.get_tensor_by_name(name) for name in self.inside], axis=0)
        _compat.replace_input(graph.get_operation_by_name(self.operation), 0, _of_any_length(everything))
        reduced = graph.get_tensor_by_name(self.reduced)
        results = []
        for tensor in tensors:
            first, self.elements = self.elements, self.elements + tensor.shape.num_elements()
            results.append(tf.reshape(reduced[first : self.elements], tensor.shape))
        return results


_doors: weakref.WeakKeyDictionary[tf.Graph, dict[Any, _Door]] = weakref.WeakKeyDictionary()


def possible() -> bool:
    """Whether calls become parts of one graph, which runs when all of them are made."""
    return (
        not tf.executing_eagerly()
        and tf.compat.v1.executing_eagerly_outside_functions()
        and not _compat.compiled_by_xla()
    )


def reduce_with_earlier_calls(values: Sequence[Any], key: Hashable, reduce: Reduce) -> list[Any]:
    """Reduce a list in the graph of a ``tf.function``, together with those of earlier calls, where that is possible.

    Args:
        values: dense tensors, ``tf.IndexedSlices`` and ``None``. Dense tensors of known shape travel together.
        key: what the calls have in common that may be one collective a dtype.
        reduce: makes the collectives of a list, in which there may be one tensor of unknown length of each dtype more.

    Returns:
        A list of the same length and order.
    """
    graph = tf.compat.v1.get_default_graph()
    doors = _doors.setdefault(graph, {})
    rest, results = list(values), [None] * len(values)
    outside = []
    for dtype, positions in _by_dtype(values).items():
        tensors = [values[position] for position in positions]
        door = doors.get((key, dtype))
        if door is None or not door.admits(graph, tensors):
            outside.append(dtype)
            continue
        for position, reduced in zip(positions, _let_in(door, graph, tensors, reduce)):
            rest[position], results[position] = None, reduced
    if any(result is not None for result in results) and all(value is None for value in rest):
        return results
    made_before = len(graph.get_operations())
    entries = [tf.identity(_of_any_length(tf.zeros([0], dtype)), "later_calls") for dtype in outside]
    reduced_rest = reduce([*rest, *entries], alone=False)
    for dtype, entry, reduced in zip(outside, entries, reduced_rest[len(rest) :]):
        doors[key, dtype] = _Door(made_before, entry.op.name, reduced.name)
    return [result if value is None else reduced for value, result, reduced in zip(rest, results, reduced_rest)]


def _of_any_length(vector: tf.Tensor) -> tf.Tensor:
    """The same without a known length; only tensors of the same static shape take each other's place."""
    return tf.compat.v1.placeholder_with_default(vector, [None])


def _let_in(door: _Door, graph: tf.Graph, tensors: Sequence[tf.Tensor], reduce: Reduce) -> list[tf.Tensor]:
    if not tensors[0].dtype.is_floating:
        return door.let_in(graph, tensors)

    @tf.custom_gradient
    def differentiable(*tensors: tf.Tensor) -> tuple[list[tf.Tensor], Any]:
        return door.let_in(graph, tensors), lambda *upstream: reduce(upstream, alone=True)

    reduced = differentiable(*tensors)
    return list(reduced) if isinstance(reduced, (list, tuple)) else [reduced]


def _resources(operation: tf.Operation) -> list[tf.Tensor]:
    return [tensor for tensor in operation.inputs if tensor.dtype == tf.resource]


def _by_dtype(values: Sequence[Any]) -> dict[tf.DType, list[int]]:
    """Positions of the dense tensors of known shape."""
    found: dict[tf.DType, list[int]] = {}
    for position, value in enumerate(values):
        if isinstance(value, tf.Tensor) and value.shape.is_fully_defined():
            found.setdefault(value.dtype, []).append(position)
    return found
