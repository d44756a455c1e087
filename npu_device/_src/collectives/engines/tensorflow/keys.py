"""TensorFlow's instance keys: they match the executions of a collective on the ranks of a group.

A key is drawn when the operation runs, in program order, so that every rank draws the same one for the same operation.
A key fixed during tracing would differ as soon as one rank retraces and another doesn't. TensorFlow's
own way of passing it at each call (``capture_call_time_value``) fails for a function that is called in a loop or a
branch, as Keras 3 does with ``steps_per_execution`` (seen with TensorFlow 2.20).

TensorFlow keeps 1.5 KB for each key forever, and what the key stands for: kind, dtype and shape. So keys are
reused, in a ring for each combination.
"""

from __future__ import annotations

import threading
import weakref
from collections import defaultdict
from collections.abc import Hashable
from typing import Any

import numpy as np
import tensorflow as tf

from npu_device._src import compat
from npu_device._src.collectives.graph import Order
from npu_device._src.collectives.group import Group
from npu_device._src.collectives.job import Job

RING = 16
"""The number of keys for one kind, dtype and shape before they repeat. That many collectives may run at once. In a
graph with more of a kind and dtype, each waits until the one that is so many places before it has ended.
"""

_LANES = 16


class Sequence:
    """The keys of one group on one of its members.

    Args:
        job: the job.
    """

    def __init__(self, job: Job) -> None:
        with tf.init_scope(), tf.device(job.device("CPU")):
            self._lanes = [compat.plain_variable(tf.constant(0, tf.int32)) for _ in range(_LANES)]
        self._order = Order(job.device("CPU"))
        self._used = 0
        self._lock = threading.Lock()
        # For each signature, the first key of its ring and a count.
        self._drawn: dict[Hashable, list[int]] = {}
        # For each graph, kind and dtype, the names of the collectives.
        self._made: weakref.WeakKeyDictionary[tf.Graph, defaultdict[Hashable, list[str]]] = weakref.WeakKeyDictionary()

    def draw(self, kind: Hashable, dtype: tf.DType, shape: tf.TensorShape | tf.Tensor) -> tf.Tensor:
        """Return the next key: int32, shape []. An operation of the graph in a tf.function, a value in eager mode.

        Args:
            kind: the operation, and whatever else TensorFlow remembers with a key, such as the root.
            dtype: dtype of the tensor that is sent.
            shape: shape of the tensor that is sent; a vector if only the running graph knows it.
        """
        known = shape.as_list() if isinstance(shape, tf.TensorShape) else None
        if tf.executing_eagerly():
            sizes = known if known is not None else np.asarray(shape).tolist()
            return tf.constant(np.int32(self._next((kind, dtype.name, tuple(sizes)))))
        names = self._made_in_graph()[kind, dtype.name]
        graph = tf.compat.v1.get_default_graph()
        before = [graph.get_operation_by_name(names[-RING])] if len(names) >= RING else []

        def drawn(*shape: Any) -> list[np.int64]:
            sizes = shape[0].tolist() if known is None else known
            return [np.int64(self._next((kind, dtype.name, tuple(sizes))))]

        with tf.device("CPU:0"), tf.control_dependencies(before):
            return tf.cast(self._order.call(drawn, [shape] if known is None else [])[0], tf.int32)

    def _next(self, signature: Hashable) -> int:
        with self._lock:
            ring = self._drawn.setdefault(signature, [1 + len(self._drawn) * RING, 0])
            ring[1] += 1
            return ring[0] + ring[1] % RING

    def note(self, kind: Hashable, result: tf.Tensor) -> None:
        """Note the result of the collective for which a key was drawn."""
        if not tf.executing_eagerly():
            self._made_in_graph()[kind, result.dtype.name].append(result.op.name)

    def _made_in_graph(self) -> defaultdict[Hashable, list[str]]:
        return self._made.setdefault(tf.compat.v1.get_default_graph(), defaultdict(list))

    def lane(self) -> tf.Tensor:
        """Return a resource by which TensorFlow orders the operations of a graph: not that of the last calls."""
        self._used += 1
        return compat.through_outer_graphs(self._lanes[1 + self._used % (_LANES - 1)].handle)

    def touch(self) -> None:
        """Add an operation that TensorFlow keeps in a graph, in the group's own order."""
        tf.raw_ops.AssignAddVariableOp(resource=compat.through_outer_graphs(self._lanes[0].handle), value=0)


def order_of_nccl(job: Job) -> tf.Tensor:
    """Return the resource by which TensorFlow orders all collectives that use NCCL.

    It is on the GPU: TensorFlow places an operation where its resources are, whatever device it was given, and a
    collective that moves to the CPU waits forever for the other ranks' GPUs (TensorFlow 2.20).
    """
    with job.making:
        if job.nccl_order is None:
            with tf.init_scope(), tf.device(job.device("GPU")):
                job.nccl_order = compat.plain_variable(tf.constant(0.0))  # not every release has integers there
        return compat.through_outer_graphs(job.nccl_order.handle)


def sequence_of(job: Job, group: Group) -> Sequence:
    """Return the sequence of a group, made at its first use.

    It outlives the group: TensorFlow remembers what the group's keys stand for.
    """
    with job.making:  # or two threads might each make one
        if group not in job.sequences:
            job.sequences[group] = Sequence(job)
        return job.sequences[group]
