"""Call TensorFlow's collective kernels; only this module does.

Each call takes one dense tensor of a supported dtype, of the same shape on every rank. Everything else (other dtypes,
tensors without elements, lists) is in ``engine``.

A collective's executions on the ranks match by their instance keys. A key is drawn when the operation runs, in program
order, so that every rank draws the same one for the same operation. A key fixed during tracing would differ as soon as
one rank retraces and another doesn't. TensorFlow's own way of passing it at each call (``capture_call_time_value``)
fails for a function that is called in a loop or a branch, as Keras 3 does with ``steps_per_execution`` (seen with
TensorFlow 2.20).

TensorFlow keeps 1.5 KB for each key forever, and what the key stands for: kind, dtype and shape. So keys are reused, in
a ring for each combination.
"""

from __future__ import annotations

import threading
import weakref
from collections import defaultdict
from collections.abc import Hashable
from functools import partial
from typing import Any, Callable

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
    """The keys of one group on one of its members."""

    def __init__(self, job: Job) -> None:
        with tf.init_scope(), tf.device(job.device("CPU")):
            self._lanes = [compat.plain_variable(tf.constant(0, tf.int32)) for _ in range(_LANES)]
        self._order = Order(job.device("CPU"))
        self._used = 0
        self._lock = threading.Lock()
        self._drawn: dict[Hashable, list[int]] = {}  # for each signature, the first key of its ring and a count
        # For each graph, kind and dtype, the names of the collectives.
        self._made: weakref.WeakKeyDictionary[tf.Graph, defaultdict[Hashable, list[str]]] = weakref.WeakKeyDictionary()

    def draw(self, kind: Hashable, dtype: tf.DType, shape: tf.TensorShape | tf.Tensor) -> tf.Tensor:
        """Return the next key, int32, for what TensorFlow remembers with a key: the operation and its root (``kind``),
        and dtype and shape of the tensor that is sent; the shape is a vector if only the running graph knows it.
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
        if not tf.executing_eagerly():
            self._made_in_graph()[kind, result.dtype.name].append(result.op.name)

    def _made_in_graph(self) -> defaultdict[Hashable, list[str]]:
        return self._made.setdefault(tf.compat.v1.get_default_graph(), defaultdict(list))

    def lane(self) -> tf.Tensor:
        """Return a resource by which TensorFlow orders the operations of a graph: not that of the last calls."""
        self._used += 1
        return compat.through_outer_graphs(self._lanes[1 + self._used % (_LANES - 1)].handle)

    def touch(self) -> None:
        """Add an operation that TensorFlow keeps in a graph, in the order of the group."""
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
    """Return the sequence of a group. It outlives the group: TensorFlow remembers what its keys stand for."""
    with job.making:  # or two threads might each make one
        if group not in job.sequences:
            job.sequences[group] = Sequence(job)
        return job.sequences[group]


# The kernels


MOVE_DTYPES = (tf.float16, tf.float32, tf.float64, tf.int32, tf.int64)
"""The dtypes that TensorFlow's gather, all-to-all and broadcast kernels all support on the CPU."""

# The most pieces into which a rank's part of the ring is cut, so that sending one overlaps with adding another.
# TensorFlow itself makes pieces of at most 4 MiB, as far as this allows. Measured on two ranks (docs/notes.md): with
# larger pieces, 400 MiB take twice as long.
_SUBDIVISIONS = 32

_MERGE_OPS = {"sum": "Add", "prod": "Mul", "min": "Min", "max": "Max"}


def all_reduce(job: Job, tensor: tf.Tensor, reduction: str, group: Group) -> tf.Tensor:
    how = {"merge_op": _MERGE_OPS[reduction], "final_op": "Id", "max_subdivs_per_device": _SUBDIVISIONS}
    kernel = partial(tf.raw_ops.CollectiveReduceV2, input=tensor, **how)
    return _run(job, tensor, group, ("all_reduce", reduction), kernel)


def all_gather(job: Job, tensor: tf.Tensor, group: Group) -> tf.Tensor:
    return _run(job, tensor, group, "all_gather", partial(tf.raw_ops.CollectiveGatherV2, input=tensor))


def all_to_all(job: Job, tensor: tf.Tensor, group: Group) -> tf.Tensor:
    """Send row i of the tensor to rank i, and return the row from rank i as row i. Shape [group.size, …].

    With NCCL all rows go to all ranks: there, with one GPU per process, TensorFlow 2.20 returns a rank its own rows.
    Seen on an H200; no upstream issue is known.
    """
    if job.hosts.uses_nccl(tensor.dtype):
        rows = tf.reshape(all_gather(job, tensor, group), tf.concat([[group.size], tf.shape(tensor)], 0))
        return rows[:, group.rank]
    return _run(job, tensor, group, "all_to_all", partial(tf.raw_ops.CollectiveAllToAllV2, input=tensor))


def broadcast(job: Job, tensor: tf.Tensor, root_rank: int, group: Group) -> tf.Tensor:
    """Return the tensor of the root on every rank; the others pass one of the same shape and dtype."""
    kernel = partial(tf.raw_ops.CollectiveBcastSendV2, input=tensor)
    if group.rank != root_rank:
        kernel = partial(tf.raw_ops.CollectiveBcastRecvV2, shape=tf.shape(tensor), T=tensor.dtype)
    result = _run(job, tensor, group, ("broadcast", root_rank), kernel, ordered=False)
    # Of all collectives TensorFlow drops only broadcasts whose result isn't used (``ASYNC_STATEFUL_OPS`` of its
    # automatic control dependencies, TensorFlow 2.20), and the ranks that do use it would wait forever. An operation
    # that writes to a variable is never dropped. Can go when TensorFlow keeps broadcasts, too.
    if not tf.executing_eagerly():
        with tf.control_dependencies([result]):
            sequence_of(job, group).touch()
    return result


def _run(
    job: Job, tensor: tf.Tensor, group: Group, kind: Hashable, kernel: Callable[..., tf.Tensor], ordered: bool = True
) -> tf.Tensor:
    # The stall watch learns from when to when it runs: a rank that stops in it would not be missed before the next
    # agreement, which the others never reach.
    cpu, device = job.device("CPU"), _device(job, tensor.dtype)
    gpu = device != cpu
    sequence, watch = sequence_of(job, group), job.stall_watch.transfers_of(group, cpu)
    watch.begin(tensor)
    shape = tensor.shape if tensor.shape.is_fully_defined() else tf.shape(tensor)
    with tf.device(cpu):  # keys are the CPU's work, also for a collective between GPUs
        key = sequence.draw(kind, tensor.dtype, shape)
    # TensorFlow's groups consist of devices, so a group has one key for its CPUs and another for its GPUs.
    group_key, hint = group.key + gpu, "nccl" if gpu else "auto"
    tokens: list[tf.Tensor] = []
    if not tf.executing_eagerly():
        # In a tf.function TensorFlow serializes stateful operations without a resource, and those on the same resource.
        # On the CPU neighbouring collectives get different resources, so that none waits for another. NCCL needs the
        # same order on every rank, in all groups, so there all get the same one.
        tokens = [order_of_nccl(job) if gpu else sequence.lane()]
    order = {"ordering_token": tokens} if ordered else {}
    with tf.device(device):
        result = kernel(group_size=group.size, group_key=group_key, instance_key=key, communication_hint=hint, **order)
    watch.end(result)
    sequence.note(kind, result)
    return result


def _device(job: Job, dtype: tf.DType) -> str:
    """Return the device on which tensors of a dtype travel, of the same kind on every rank."""
    return job.device("GPU" if job.hosts.uses_nccl(dtype) else "CPU")
