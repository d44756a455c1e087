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
from npu_device._src.collectives.engines.context import EngineContext
from npu_device._src.collectives.graph import Order
from npu_device._src.collectives.group import Group, GroupTable

RING = 16
"""The number of keys for one kind, dtype and shape before they repeat. That many collectives may run at once. In a
graph with more of a kind and dtype, each waits until the one that is so many places before it has ended.
"""

_LANES = 16


class KeySequence:
    """The keys of one group on one of its members."""

    def __init__(self, device: str) -> None:
        # Made outside of the function that is being traced, which may be the first to use the group.
        with tf.init_scope(), tf.device(device):
            self._lanes = [compat.plain_variable(tf.constant(0, tf.int32)) for _ in range(_LANES)]
        self._order = Order(device)
        self._used = 0
        self._lock = threading.Lock()
        # The first key of the ring of each signature, and how many were drawn.
        self._drawn: dict[Hashable, list[int]] = {}
        # The names of the collectives of each graph, by kind and dtype.
        self._names = weakref.WeakKeyDictionary[tf.Graph, defaultdict[Hashable, list[str]]]()

    def draw(self, call: Hashable, dtype: tf.DType, shape: tf.TensorShape | tf.Tensor) -> tf.Tensor:
        """Return the next key, int32, for what TensorFlow remembers with a key: the collective and its root (``call``),
        and dtype and shape of the tensor that is sent; the shape is a vector if only the running graph knows it.
        """
        static_shape = None
        if isinstance(shape, tf.TensorShape):
            static_shape = tuple(shape.as_list())
        # An eager tensor has a static shape.
        if tf.executing_eagerly():
            return tf.constant(np.int32(self._next((call, dtype.name, static_shape))))
        names = self._made_in_graph()[call, dtype.name]
        graph = tf.compat.v1.get_default_graph()
        earlier = []
        if len(names) >= RING:
            earlier = [graph.get_operation_by_name(names[-RING])]
        inputs = [shape]
        if static_shape is not None:
            inputs = []

        def drawn(*shape: Any) -> list[np.int64]:
            sizes = static_shape
            if shape:
                sizes = tuple(shape[0].tolist())
            return [np.int64(self._next((call, dtype.name, sizes)))]

        with tf.device("CPU:0"), tf.control_dependencies(earlier):
            [key] = self._order.call(drawn, inputs)
            return tf.cast(key, tf.int32)

    def _next(self, signature: Hashable) -> int:
        with self._lock:
            # A key comes again only when the collective that had it has ended.
            # Rings don't overlap: the number of signatures so far says where the next one begins.
            ring = self._drawn.setdefault(signature, [1 + len(self._drawn) * RING, 0])
            ring[1] += 1
            return ring[0] + ring[1] % RING

    def note(self, call: Hashable, output: tf.Tensor) -> None:
        if not tf.executing_eagerly():
            self._made_in_graph()[call, output.dtype.name].append(output.op.name)

    def _made_in_graph(self) -> defaultdict[Hashable, list[str]]:
        return self._names.setdefault(tf.compat.v1.get_default_graph(), defaultdict(list))

    def lane(self) -> tf.Tensor:
        """Return a resource by which TensorFlow orders the operations of a graph: not that of the last calls."""
        # Lane 0 is for ``touch``, whose order must not delay a collective.
        self._used += 1
        return compat.through_outer_graphs(self._lanes[1 + self._used % (_LANES - 1)].handle)

    def touch(self) -> None:
        """Add an operation that TensorFlow keeps in a graph, in the order of the group."""
        tf.raw_ops.AssignAddVariableOp(
            resource=compat.through_outer_graphs(self._lanes[0].handle), value=0
        )


# The kernels


MOVE_DTYPES = (tf.float16, tf.float32, tf.float64, tf.int32, tf.int64)
"""The dtypes that TensorFlow's gather, all-to-all and broadcast kernels all support on the CPU."""

# The most pieces into which a rank's part of the ring is cut, so that sending one overlaps with adding another.
# TensorFlow itself makes pieces of at most 4 MiB, as far as this allows. Measured on two ranks (docs/notes.md): with
# larger pieces, 400 MiB take twice as long.
_SUBDIVISIONS = 32

_MERGE_OPS = {"sum": "Add", "prod": "Mul", "min": "Min", "max": "Max"}


class Kernels:
    """TensorFlow's collective kernels, as this rank of the job calls them."""

    def __init__(self, context: EngineContext) -> None:
        self._context = context
        # A sequence outlives its group: TensorFlow remembers what its keys stand for.
        self._sequences = GroupTable[KeySequence]()
        # The variable by which TensorFlow orders the collectives that use NCCL.
        self._nccl_order: Any = None

    def all_reduce(self, tensor: tf.Tensor, reduction: str, group: Group) -> tf.Tensor:
        merge = _MERGE_OPS[reduction]
        kernel = partial(tf.raw_ops.CollectiveReduceV2, input=tensor, merge_op=merge, final_op="Id")
        kernel = partial(kernel, max_subdivs_per_device=_SUBDIVISIONS)
        return self._run(tensor, group, ("all_reduce", reduction), kernel)

    def all_gather(self, tensor: tf.Tensor, group: Group) -> tf.Tensor:
        return self._run(
            tensor, group, "all_gather", partial(tf.raw_ops.CollectiveGatherV2, input=tensor)
        )

    def all_to_all(self, tensor: tf.Tensor, group: Group) -> tf.Tensor:
        """Send row i of the tensor to rank i, and return the row from rank i as row i. Shape [group.size, …].

        With NCCL all rows go to all ranks: there, with one GPU per process, TensorFlow 2.20 returns a rank its own
        rows. Seen on an H200; no upstream issue is known.
        """
        if self._context.hosts.uses_nccl(tensor.dtype):
            gathered = self.all_gather(tensor, group)
            shape = tf.concat([[group.size], tf.shape(tensor)], 0)
            rows = tf.reshape(gathered, shape)
            return rows[:, group.rank]
        return self._run(
            tensor, group, "all_to_all", partial(tf.raw_ops.CollectiveAllToAllV2, input=tensor)
        )

    def broadcast(self, tensor: tf.Tensor, root_rank: int, group: Group) -> tf.Tensor:
        """Return the tensor of the root on every rank; the others pass one of the same shape and dtype."""
        kernel = partial(tf.raw_ops.CollectiveBcastSendV2, input=tensor)
        if group.rank != root_rank:
            kernel = partial(
                tf.raw_ops.CollectiveBcastRecvV2, shape=tf.shape(tensor), T=tensor.dtype
            )
        result = self._run(tensor, group, ("broadcast", root_rank), kernel, is_ordered=False)
        # TensorFlow drops broadcasts whose result isn't used, unlike all other collectives (``ASYNC_STATEFUL_OPS`` of
        # its automatic control dependencies, TensorFlow 2.20), and the ranks that do use it would wait forever. An
        # operation that writes to a variable is never dropped. Can go when TensorFlow keeps broadcasts, too.
        if not tf.executing_eagerly():
            with tf.control_dependencies([result]):
                self.sequence_of(group).touch()
        return result

    def sequence_of(self, group: Group) -> KeySequence:
        """Return the keys of a group."""
        return self._sequences.of(group, lambda _: KeySequence(self._context.device("CPU")))

    def _run(
        self,
        tensor: tf.Tensor,
        group: Group,
        call: Hashable,
        kernel: Callable[..., tf.Tensor],
        is_ordered: bool = True,
    ) -> tf.Tensor:
        # The stall watch learns from when to when it runs: a rank that stops in it would not be missed before the next
        # agreement, which the others never reach.
        cpu = self._context.device("CPU")
        device = self._device(tensor.dtype)
        is_gpu = device != cpu
        sequence = self.sequence_of(group)
        count = self._context.counts.transfers_of(group, cpu)
        count.begin(tensor)
        shape = tensor.shape
        if not shape.is_fully_defined():
            shape = tf.shape(tensor)
        # The CPU computes the keys, also of a collective between GPUs.
        with tf.device(cpu):
            key = sequence.draw(call, tensor.dtype, shape)
        tokens = []
        if not tf.executing_eagerly():
            # In a tf.function TensorFlow serializes stateful operations without a resource, and those on the same
            # resource. On the CPU neighbouring collectives get different resources, so that none waits for another.
            # NCCL needs the same order on every rank, in all groups, so there all get the same one.
            tokens = [self._order_of_nccl() if is_gpu else sequence.lane()]
        order = {}
        if is_ordered:
            order = {"ordering_token": tokens}
        # TensorFlow's groups consist of devices, so a group has one key for its CPUs and another for its GPUs.
        kernel = partial(
            kernel, group_size=group.size, group_key=group.key + is_gpu, instance_key=key
        )
        with tf.device(device):
            hint = "auto"
            if is_gpu:
                hint = "nccl"
            result = kernel(communication_hint=hint, **order)
        count.end(result)
        sequence.note(call, result)
        return result

    def _device(self, dtype: tf.DType) -> str:
        """Return the device on which tensors of a dtype travel, of the same kind on every rank."""
        return self._context.device("GPU" if self._context.hosts.uses_nccl(dtype) else "CPU")

    def _order_of_nccl(self) -> tf.Tensor:
        """Return the resource by which TensorFlow orders all collectives that use NCCL.

        It is on the GPU: TensorFlow places an operation where its resources are, whatever device it was given, and a
        collective that moves to the CPU waits forever for the other ranks' GPUs (TensorFlow 2.20).
        """
        with self._context.making:
            if self._nccl_order is None:
                with tf.init_scope(), tf.device(self._context.device("GPU")):
                    # A number of any dtype will do, and not every release has integers on GPUs.
                    self._nccl_order = compat.plain_variable(tf.constant(0.0))
            return compat.through_outer_graphs(self._nccl_order.handle)
