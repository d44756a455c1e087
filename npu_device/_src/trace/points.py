"""Points in time, wherever a script runs: a clock that is read when tensors are there.

In a graph, a point is a ``Timestamp`` behind control dependencies, which takes well under a microsecond. It is marked
as independent of other stateful operations, which ``tf.function`` runs one after the other.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from npu_device._src import compat
from npu_device._src.collectives.engines.host.host_engine import end_of
from npu_device._src.collectives.graph import origin

# A step's inputs from outside; forward starts when they are there.
_INPUTS = ("Placeholder", "IteratorGetNext", "IteratorGetNextAsOptional", "OptionalGetValue")


def when(values: Iterable[Any]) -> Any:
    """Return the time when values, of this graph or one around it, are there: a float eagerly, a scalar in a graph."""
    if tf.executing_eagerly():
        return time.time()
    operations = [_operation(value) for value in values]
    return _read(operations, operations[0].graph if operations else tf.compat.v1.get_default_graph())


def reduced(value: Any) -> Any:
    """Return the time when the collective that makes a value was over, perhaps before a thread has made the value."""
    ended = None if tf.executing_eagerly() else end_of(_operation(value))
    return when([value]) if ended is None else ended


def forward_start(gradients: Sequence[Any]) -> Any:
    """Return the time when all inputs of a step with these gradients are there; None in eager mode."""
    if tf.executing_eagerly():
        return None
    targets = [_operation(gradient) for gradient in gradients]
    return _read([operation for operation in leading_to(targets) if operation.type in _INPUTS], targets[0].graph)


def _read(operations: Sequence[tf.Operation], graph: tf.Graph) -> tf.Tensor:
    with graph.as_default():
        if getattr(graph, "building_function", False):
            # Otherwise a block of control dependencies around the caller would apply.
            with tf.control_dependencies(None), tf.control_dependencies(operations):
                point = tf.timestamp()
        else:
            with tf.control_dependencies(operations):
                point = tf.timestamp()
    compat.run_independently(point.op)
    return point


def _operation(value: Any) -> tf.Operation:
    """Return the operation that makes a value, in its own graph; not the input of a branch or loop."""
    if isinstance(value, tf.Operation):
        return value
    return origin(value.values if isinstance(value, tf.IndexedSlices) else value).op


def leading_to(targets: Sequence[tf.Operation]) -> Iterator[tf.Operation]:
    """Yield operations of a graph and all those on which they depend."""
    seen: set[tf.Operation] = set()
    waiting = list(targets)
    while waiting:
        operation = waiting.pop()
        if operation not in seen:
            seen.add(operation)
            waiting += (tensor.op for tensor in operation.inputs)
            waiting += operation.control_inputs
            yield operation
