"""Which tensors are results of a reduction. Whoever applies gradients is asked later whether they were reduced."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

_LATEST = 4096  # eager results that are remembered
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
            self._eager.extend(map(weakref.ref, tensors))
            return
        for tensor in tensors:
            self._graphs.setdefault(tensor.graph, set()).add(tensor.name)

    def missing_in(self, gradients: Sequence[Any]) -> list[Any]:
        """Return the gradients that aren't known to be results of a reduction or, in a function, to be computed from
        such results only, by clipping or scaling.
        """
        if tf.executing_eagerly():
            results = {id(result) for reference in self._eager if (result := reference()) is not None}
            return [gradient for gradient in gradients if id(dense_of(gradient)) not in results]
        origins: dict[tf.Graph, dict[str, set[str]]] = {}
        return [one for one in gradients if self._origins(dense_of(one).graph, origins)[dense_of(one).name] != {"sum"}]

    def _origins(self, graph: Any, known: dict[tf.Graph, dict[str, set[str]]]) -> dict[str, set[str]]:
        """Return, for each tensor of a graph, whether it is computed from reductions ("sum") and tapes ("tape")."""
        if graph in known:
            return known[graph]
        found: dict[str, set[str]] = {}
        results, outside = self._graphs.get(graph, ()), {id(own): out for out, own in getattr(graph, "captures", ())}
        for operation in graph.get_operations():
            captured = [outside.get(id(each)) for each in operation.outputs if operation.type == "Placeholder"]
            origins = {"tape"} if _TAPE in operation.name else set()
            for each in [] if origins else [*operation.inputs, *filter(tf.is_symbolic_tensor, captured)]:
                origins |= (found if each.graph is graph else self._origins(each.graph, known)).get(each.name, set())
            found.update({each.name: {"sum"} if each.name in results else origins for each in operation.outputs})
        known[graph] = found
        return found


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
