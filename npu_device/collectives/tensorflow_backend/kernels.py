"""TensorFlow's collective operations as they are: the only door to their kernels.

One dense tensor of a dtype that they take, of the same shape on every rank. What is composed of it (other dtypes,
tensors without elements, lists) stands in ``backend``.

Each execution of an operation gets a fresh instance key from ``sequence``.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from npu_device import _compat
from npu_device.cluster.runtime import Runtime
from npu_device.collectives.group import Group
from npu_device.collectives.tensorflow_backend.sequence import sequence_of

MOVE_DTYPES = (tf.float16, tf.float32, tf.float64, tf.int32, tf.int64)
"""What TensorFlow's gather, all-to-all and broadcast kernels all take on the CPU."""

# Into how many pieces a rank's part of the ring is cut at most, so that sending one and adding another up overlap.
# Measured on two ranks of one host (docs/benchmarks.md): against TensorFlow's default 1.3 times the bandwidth at 17
# MB, 2.2 times at 105 MB; 16 pieces are no better.
_SUBDIVISIONS = 8

_MERGE_OPS = {"sum": "Add", "prod": "Mul", "min": "Min", "max": "Max"}


def all_reduce(runtime: Runtime, tensor: tf.Tensor, reduction: str, group: Group) -> tf.Tensor:
    """Sum, prod, min or max of one tensor over the group."""
    device, kind = _device(runtime, tensor.dtype)
    with tf.device(device):
        return tf.raw_ops.CollectiveReduceV2(
            input=tensor,
            merge_op=_MERGE_OPS[reduction],
            final_op="Id",
            max_subdivs_per_device=_SUBDIVISIONS,
            **_keys(runtime, group, kind),
            **_order(runtime, group, kind),
        )


def all_gather(runtime: Runtime, tensor: tf.Tensor, group: Group) -> tf.Tensor:
    """The tensors of all ranks of the group, one after the other along the first dimension."""
    device, kind = _device(runtime, tensor.dtype)
    with tf.device(device):
        keys = {**_keys(runtime, group, kind), **_order(runtime, group, kind)}
        return tf.raw_ops.CollectiveGatherV2(input=tensor, **keys)


def all_to_all(runtime: Runtime, tensor: tf.Tensor, group: Group) -> tf.Tensor:
    """Row i of the tensor goes to rank i; row i of the result comes from rank i. Shape [group.size, …]."""
    device, kind = _device(runtime, tensor.dtype)
    with tf.device(device):
        keys = {**_keys(runtime, group, kind), **_order(runtime, group, kind)}
        return tf.raw_ops.CollectiveAllToAllV2(input=tensor, **keys)


def broadcast(runtime: Runtime, tensor: tf.Tensor, root_rank: int, group: Group) -> tf.Tensor:
    """The root's tensor, on every rank; the others give one of the same shape and dtype."""
    if group.rank != root_rank:
        return broadcast_receive(runtime, tf.shape(tensor), tensor.dtype, group)
    device, kind = _device(runtime, tensor.dtype)
    with tf.device(device):
        return _kept(runtime, group, tf.raw_ops.CollectiveBcastSendV2(input=tensor, **_keys(runtime, group, kind)))


def broadcast_receive(runtime: Runtime, shape: tf.Tensor, dtype: tf.DType, group: Group) -> tf.Tensor:
    """What the root broadcasts, on another rank, which knows its shape and dtype."""
    device, kind = _device(runtime, dtype)
    with tf.device(device):
        keys = _keys(runtime, group, kind)
        return _kept(runtime, group, tf.raw_ops.CollectiveBcastRecvV2(shape=shape, T=dtype, **keys))


def _kept(runtime: Runtime, group: Group, result: tf.Tensor) -> tf.Tensor:
    """Of all collectives TensorFlow drops broadcasts from a tf.function whose result isn't used (``ASYNC_STATEFUL_OPS``
    of its automatic control dependencies, TensorFlow 2.20); the ranks that do use it would wait for ever. What writes
    to a variable is never dropped.
    """
    if not tf.executing_eagerly():
        with tf.control_dependencies([result]):
            sequence_of(runtime, group).touch()
    return result


def _device(runtime: Runtime, dtype: tf.DType) -> tuple[str, str]:
    """Floating-point tensors travel between the GPUs where there are some, everything else between the hosts'
    memories.
    """
    kind = "GPU" if dtype.is_floating and tf.config.get_visible_devices("GPU") else "CPU"
    if kind == "CPU" and _compat.compiled_by_xla():
        raise RuntimeError(
            f"rank {runtime.cluster.rank}: a collective operation was called in a function that XLA compiles "
            "(jit_compile=True), and XLA can't talk to other processes on the CPU.\n"
            "What to do: leave jit_compile out of tf.function, or pass jit_compile=False to model.compile."
        )
    return runtime.device(kind), kind


def _keys(runtime: Runtime, group: Group, kind: str) -> dict[str, Any]:
    sequence = sequence_of(runtime, group)
    # In a function that XLA compiles for the GPU the operations are ordered by XLA, which doesn't look at the key.
    instance_key = tf.constant(0) if _compat.compiled_by_xla() else sequence.draw()
    # TensorFlow's groups are made of devices, so that a group has one key for its CPUs and another for its GPUs.
    return {
        "group_size": group.size,
        "group_key": group.key + (kind == "GPU"),
        "instance_key": instance_key,
        "communication_hint": "nccl" if kind == "GPU" else "auto",
    }


def _order(runtime: Runtime, group: Group, kind: str) -> dict[str, Any]:
    """TensorFlow runs operations of a tf.function that have a state, but no resource, one after the other, and those
    on one resource likewise. On the CPU each collective gets another resource than its neighbours, so that none waits
    for another; NCCL wants the same order on every rank, and gets it by one resource.
    """
    if tf.executing_eagerly():
        return {"ordering_token": []}
    return {"ordering_token": [sequence_of(runtime, group).lane(apart=kind == "CPU")]}
