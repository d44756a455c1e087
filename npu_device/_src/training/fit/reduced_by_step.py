"""Tells which gradients a step has reduced itself, with ``npu.distribute.all_reduce``, before it applies them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from npu_device._src.training.fit.current import current_step


def reduced_by_step(gradients: Iterable[Any]) -> bool:
    """Return True if gradients depend on this rank's samples only through what the current step has reduced.

    In eager mode no graph tells what a gradient was made of: then they are the very results of a reduction. A gradient
    that is reduced once more for lack of that stays as it is, but for rounding: the mean of equal values.
    """
    step = current_step()
    if step is None or not step.reduced:
        return False
    done = {id(part) for result in step.reduced for part in _parts(result)}
    parts = [part for gradient in gradients for part in _parts(gradient)]
    if tf.executing_eagerly():
        return all(id(part) in done for part in parts)
    samples = {id(part) for part in _parts(step.share.data)}
    return all(_comes_from(part, done, samples) for part in parts)


def _parts(value: Any) -> list[Any]:
    return [part for part in tf.nest.flatten(value, expand_composites=True) if part is not None]


_SOURCES = ("Random", "Stateless", "Stateful", "Multinomial", "PyFunc", "EagerPyFunc", "Iterator", "Placeholder")
_READERS = ("ReadVariableOp", "ResourceGather", "VariableShape")


def _comes_from(tensor: Any, reduced: set[int], samples: set[int]) -> bool:
    """Return True if each way back from a tensor ends in a reduced one, in a constant, or in a variable that the graph
    sets to such values, and at least one in a reduced one. False if the graph doesn't tell.
    """
    waiting, found = [tensor], False
    seen: set[str] = set()
    while waiting:
        tensor = waiting.pop()
        if id(tensor) in reduced:
            found = True
        elif id(tensor) in samples or not tf.is_symbolic_tensor(tensor):
            return False
        elif tensor.dtype == tf.resource:
            setters = [user for user in tensor.consumers() if not user.type.startswith(_READERS)]
            if getattr(tensor.graph, "outer_graph", None) is not None and tensor.graph.outer_graph.building_function:
                return False  # a branch or a loop; what is outside may set it
            if not all(setter.type.startswith("Assign") for setter in setters):
                return False
            waiting += [setter.inputs[1] for setter in setters if setter.name not in seen]
            seen.update(setter.name for setter in setters)
        elif tensor.op.name not in seen:
            seen.add(tensor.op.name)
            if tensor.op.type.startswith(_SOURCES):
                return False
            waiting += list(tensor.op.inputs)
    return found
