"""Which tensors are results of a reduction. Whoever applies gradients is asked later whether they were reduced."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, Optional

import tensorflow as tf

_LATEST = 256  # eager results that are remembered: as many as a loop makes that reduces each gradient by itself
_OPERATIONS = 20_000  # that are looked at among the ancestors of a list
_MAY_REDUCE = ("Call", "While", "If", "ReadVariableOp")  # in the type of an operation: what happens inside isn't seen
_TAPE = "gradient_tape/"  # before the name of an operation that computes a gradient

_Shape = Optional[tuple[Optional[int], ...]]


class ReducedTensors:
    """The results of this rank's reductions; a part of the job."""

    def __init__(self) -> None:
        self._eager: deque[weakref.ref[Any]] = deque(maxlen=_LATEST)
        self._eager_shapes: set[_Shape] = set()
        self._graphs: weakref.WeakKeyDictionary[tf.Graph, dict[str, _Shape]] = weakref.WeakKeyDictionary()

    def add(self, results: Iterable[Any]) -> None:
        """Remember the results of one reduction: dense tensors, ``tf.IndexedSlices`` and ``None``."""
        tensors = [dense_of(result) for result in results if result is not None]
        if tf.executing_eagerly():
            self._eager.extend(map(weakref.ref, tensors[:1]))  # one of a list is enough to recognise it
            self._eager_shapes.update(map(_shape, tensors))
            return
        for tensor in tensors:
            self._graphs.setdefault(tensor.graph, {})[tensor.name] = _shape(tensor)

    def begin_step(self) -> None:
        """Forget the shapes that an eager step has reduced."""
        self._eager_shapes.clear()

    def have_shapes_of(self, gradients: Sequence[Any]) -> bool:
        """Return whether something of the shape of each gradient has been reduced in this step: in this graph or those
        around it, or since ``begin_step``.
        """
        eager = tf.executing_eagerly()
        shapes: set[_Shape] = set(self._eager_shapes) if eager else set()
        graph: Any = None if eager else tf.compat.v1.get_default_graph()
        while graph is not None:
            shapes.update(self._graphs.get(graph, {}).values())
            graph = getattr(graph, "outer_graph", None)
        return all(_shape(dense_of(gradient)) in shapes for gradient in gradients)

    def lead_to(self, gradients: Sequence[Any]) -> bool | None:
        """Return whether any of the gradients is a result of a reduction or was computed from one, by clipping or
        scaling; None if it can't be told: in eager mode, or because a function got them as arguments.
        """
        tensors = [dense_of(gradient) for gradient in gradients]
        results = {id(result) for reference in self._eager if (result := reference()) is not None}
        if any(id(tensor) in results for tensor in tensors):
            return True
        waiting = [tensor for tensor in tensors if tf.is_symbolic_tensor(tensor)]
        if len(waiting) < len(tensors):
            return None
        return self._lead_to(waiting)

    def _lead_to(self, waiting: list[tf.Tensor]) -> bool | None:
        """Walk from tensors of a graph towards what they are computed from, as far as where backward computed them."""
        seen: set[tuple[int, str]] = set()
        open_end = False
        while waiting:
            tensor = waiting.pop()
            key = id(tensor.graph), tensor.op.name
            if tensor.name in self._graphs.get(tensor.graph, ()):
                return True
            if key in seen:
                continue
            seen.add(key)
            if len(seen) > _OPERATIONS:
                return None
            if tensor.op.type == "Placeholder":
                outside = next((out for out, inside in getattr(tensor.graph, "captures", ()) if inside is tensor), None)
                if tf.is_symbolic_tensor(outside):
                    waiting.append(outside)
                open_end = open_end or not tf.is_symbolic_tensor(outside)
            elif _TAPE not in tensor.op.name:
                open_end = open_end or any(kind in tensor.op.type for kind in _MAY_REDUCE)
                waiting += [each for each in tensor.op.inputs if each.dtype != tf.resource]
        return None if open_end else False


def dense_of(gradient: Any) -> Any:
    """Return a gradient's tensor; of ``tf.IndexedSlices`` the rows."""
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


def origin_of(tensor: Any) -> tuple[int, str]:
    """Return graph and name of the tensor that a tensor of a graph is a copy of; for an eager one its id."""
    while tf.is_symbolic_tensor(tensor):
        if tensor.op.type in ("Identity", "IdentityN"):
            tensor = tensor.op.inputs[tensor.value_index]
            continue
        outside = next((out for out, inside in getattr(tensor.graph, "captures", ()) if inside is tensor), None)
        if not tf.is_symbolic_tensor(outside):
            return id(tensor.graph), tensor.name
        tensor = outside
    return id(tensor), ""


def _shape(tensor: Any) -> _Shape:
    return None if tensor.shape.rank is None else tuple(tensor.shape.as_list())
