"""Which tensors are results of a reduction. Whoever applies gradients is asked later whether they were reduced."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

_LATEST = 256  # eager results that are remembered: as many as a loop makes that reduces each gradient by itself
_OPERATIONS = 20_000  # that are looked at among the ancestors of a list
_TAPE = "gradient_tape/"  # before the name of an operation that computes a gradient


class ReducedTensors:
    """The results of this rank's reductions; a part of the job."""

    def __init__(self) -> None:
        self._eager: deque[weakref.ref[Any]] = deque(maxlen=_LATEST)
        self._graphs: weakref.WeakKeyDictionary[tf.Graph, set[str]] = weakref.WeakKeyDictionary()

    def add(self, results: Iterable[Any]) -> None:
        """Remember the results of one reduction: dense tensors, ``tf.IndexedSlices`` and ``None``."""
        tensors = [dense_of(result) for result in results if result is not None]
        if tf.executing_eagerly():
            self._eager.extend(map(weakref.ref, tensors[:1]))  # one of a list is enough to recognise it
            return
        for tensor in tensors:
            self._graphs.setdefault(tensor.graph, set()).add(tensor.name)

    def lead_to(self, gradients: Sequence[Any]) -> bool:
        """Return whether any of the gradients is known to be a result of a reduction or, in a function, to be computed
        from one, by clipping or scaling.

        This walks from the gradients towards what they are computed from, as far as where backward computed them.
        """
        waiting = [dense_of(gradient) for gradient in gradients]
        results = {id(result) for reference in self._eager if (result := reference()) is not None}
        if any(id(tensor) in results for tensor in waiting):
            return True
        seen: set[tuple[int, str]] = set()
        while waiting and len(seen) < _OPERATIONS:
            tensor = waiting.pop()
            if not tf.is_symbolic_tensor(tensor) or (id(tensor.graph), tensor.name) in seen:
                continue
            seen.add((id(tensor.graph), tensor.name))
            if tensor.name in self._graphs.get(tensor.graph, ()):
                return True
            if tensor.op.type == "Placeholder":
                waiting += [out for out, inside in getattr(tensor.graph, "captures", ()) if inside is tensor]
            elif _TAPE not in tensor.op.name:
                waiting += [each for each in tensor.op.inputs if each.dtype != tf.resource]
        return False


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
