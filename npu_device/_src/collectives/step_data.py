"""Make a collective in a graph wait for the step's data, so that a step that ends without data calls it on no rank.

The end of a data set is an error inside the step, which cancels what hasn't run yet. A collective that needs none of
the step's data could run on some ranks and not on others, and their collective counts would differ from then on.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import tensorflow as tf

from npu_device._src import compat

# Operations that can end a step: reads of data, and the script's own checks and functions.
_MAY_END = (
    "IteratorGetNext",
    "IteratorGetNextSync",
    "MultiDeviceIteratorGetNextFromShard",
    "OptionalGetValue",
    "QueueDequeueV2",
    "QueueDequeueManyV2",
    "QueueDequeueUpToV2",
    "Assert",
    "EagerPyFunc",
    "PyFunc",
)
_CALLS = ("PartitionedCall", "StatefulPartitionedCall")

_seen: weakref.WeakKeyDictionary[tf.Graph, tuple[int, list[str]]] = weakref.WeakKeyDictionary()


def step_data() -> Sequence[tf.Operation]:
    """Return what the next collective of the graph being built must come after: the reads of data before it, and the
    inputs of a nested function, branch or loop.

    Empty in eager mode, where earlier operations have ended.
    """
    if tf.executing_eagerly():
        return []
    graph = tf.compat.v1.get_default_graph()
    looked_at, names = _seen.get(graph, (0, []))
    operations = graph.get_operations()
    names = names + [operation.name for operation in operations[looked_at:] if _may_end(graph, operation)]
    _seen[graph] = len(operations), names
    return [*(graph.get_operation_by_name(name) for name in names), *_inputs(graph)]


def _may_end(graph: tf.Graph, operation: tf.Operation) -> bool:
    if operation.type in _CALLS:
        return any(kind in _MAY_END for kind in compat.operations_of_call(graph, operation))
    return operation.type in _MAY_END


def _inputs(graph: tf.Graph) -> list[tf.Operation]:
    """Return the data passed to a nested graph. TensorFlow may inline the call, and then runs operations without inputs
    before the inputs are there.
    """
    if not isinstance(getattr(graph, "outer_graph", None), compat.FuncGraph):
        return []
    inputs = [tensor for tensor in graph.inputs if tensor.dtype not in (tf.resource, tf.variant)]
    return [tf.identity(tensor).op for tensor in inputs]
