"""Join several all-reduce calls with one ``fusion_id`` (``fusion=2``) in a ``tf.function`` into one collective.

The first call can't know of later ones. Its collective takes one extra tensor of each dtype, which is empty until a
later call puts its values in and takes its results from it. Values that depend on the first call's results, or on a
stateful operation created after it, stay out, since each might wait for the other: such a call becomes a collective of
its own, with extra tensors for the calls that follow.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Callable

import tensorflow as tf

from npu_device._src import compat
from npu_device._src.collectives.differentiable import differentiable
from npu_device._src.collectives.session_graph import runs_if_fetched
from npu_device._src.gradients.order import producers

Reduce = Callable[[Sequence[Any], bool], list[Any]]
"""Reduces a list: each tensor alone, if the second argument is True, or those of a dtype together."""

_READ = "ReadVariableOp"


@dataclass
class _OpenCollective:
    """A graph's collective to which later calls can be added. Refers to everything by name: the graph may be freed."""

    made_before: int  # operations of the graph when the collective was begun
    operation: str  # receives the values
    reduced: str  # the tensor of the values' results
    added: list[str] = field(default_factory=list)  # flat tensors
    elements: int = 0  # of all of them

    def can_wait_for(self, graph: tf.Graph, tensors: Sequence[tf.Tensor]) -> bool:
        """Return True when the collective can wait for these tensors."""
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

    def add(self, graph: tf.Graph, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Add tensors to the collective and return their results."""
        flat = [tf.reshape(tensor, [-1]) for tensor in tensors]
        self.added += [tensor.name for tensor in flat]
        everything = tf.concat([graph.get_tensor_by_name(name) for name in self.added], axis=0)
        compat.replace_input(graph.get_operation_by_name(self.operation), 0, _of_any_length(everything))
        reduced = graph.get_tensor_by_name(self.reduced)
        results = []
        for tensor in tensors:
            first, self.elements = self.elements, self.elements + tensor.shape.num_elements()
            results.append(tf.reshape(reduced[first : self.elements], tensor.shape))
        return results


_open: weakref.WeakKeyDictionary[tf.Graph, dict[Any, _OpenCollective]] = weakref.WeakKeyDictionary()


def possible() -> bool:
    """Return True when calls can become parts of one graph, which runs once all of them are made."""
    return not (tf.executing_eagerly() or runs_if_fetched() or compat.compiled_by_xla())


def reduce_with_earlier_calls(values: Sequence[Any], key: Hashable, reduce: Reduce) -> list[Any]:
    """Reduce a list in the graph of a ``tf.function``, together with those of earlier calls, where that is possible.

    Args:
        values: dense tensors, ``tf.IndexedSlices`` and ``None``. Dense tensors of known shape travel together.
        key: identifies calls that may become one collective per dtype.
        reduce: makes the collectives of a list, which may have one extra tensor of unknown length per dtype.

    Returns:
        A list of the same length and order.
    """
    graph = tf.compat.v1.get_default_graph()
    open_collectives = _open.setdefault(graph, {})
    rest, results = list(values), [None] * len(values)
    outside = []
    for dtype, positions in _by_dtype(values).items():
        tensors = [values[position] for position in positions]
        collective = open_collectives.get((key, dtype))
        if collective is None or not collective.can_wait_for(graph, tensors):
            outside.append(dtype)
            continue
        for position, reduced in zip(positions, _add(collective, graph, tensors, reduce)):
            rest[position], results[position] = None, reduced
    if any(result is not None for result in results) and all(value is None for value in rest):
        return results
    made_before = len(graph.get_operations())
    entries = [tf.identity(_of_any_length(tf.zeros([0], dtype)), "later_calls") for dtype in outside]
    reduced_rest = reduce([*rest, *entries], False)
    for dtype, entry, reduced in zip(outside, entries, reduced_rest[len(rest) :]):
        open_collectives[key, dtype] = _OpenCollective(made_before, entry.op.name, reduced.name)
    return [result if value is None else reduced for value, result, reduced in zip(rest, results, reduced_rest)]


def _of_any_length(vector: tf.Tensor) -> tf.Tensor:
    """Return the vector without its known length: an input can only be replaced by one of its static shape."""
    return tf.compat.v1.placeholder_with_default(vector, [None])


def _add(collective: _OpenCollective, graph: tf.Graph, tensors: Sequence[tf.Tensor], reduce: Reduce) -> list[tf.Tensor]:
    if not tensors[0].dtype.is_floating:
        return collective.add(graph, tensors)
    return differentiable(collective.add(graph, tensors), lambda *upstream: reduce(upstream, True), tensors)


def _resources(operation: tf.Operation) -> list[tf.Tensor]:
    return [tensor for tensor in operation.inputs if tensor.dtype == tf.resource]


def _by_dtype(values: Sequence[Any]) -> dict[tf.DType, list[int]]:
    """Return the positions of the dense tensors of known shape, by dtype."""
    found: dict[tf.DType, list[int]] = {}
    for position, value in enumerate(values):
        if isinstance(value, tf.Tensor) and value.shape.is_fully_defined():
            found.setdefault(value.dtype, []).append(position)
    return found
