"""Choose the backend for a call; the operations use this module.

A group whose ranks share memory uses that. One that spans hosts, some of which have several of its ranks, reduces and
spreads on each host in shared memory, and uses TensorFlow between them. All other groups use TensorFlow. If each rank
of the job has a GPU of its own, floating-point tensors go through TensorFlow and NCCL in every group.
"""

from __future__ import annotations

from collections.abc import Iterable

import tensorflow as tf

from npu_device._src import environment
from npu_device._src.cluster.runtime import Runtime
from npu_device._src.collectives.backends import two_level
from npu_device._src.collectives.backends.contract import Backend, ReducingBackend
from npu_device._src.collectives.backends.shared_memory import operations as shared_memory
from npu_device._src.collectives.backends.shared_memory.host import hosts_of
from npu_device._src.collectives.backends.tensorflow import lengths
from npu_device._src.collectives.backends.tensorflow import operations as tensorflow_backend
from npu_device._src.collectives.group import Group
from npu_device._src.collectives.stall import forget_watches


def shares_memory(runtime: Runtime, group: Group) -> bool:
    """Return whether all ranks of a group share memory; the same on every rank."""
    leaders = hosts_of(runtime).leaders
    return len({leaders[rank] for rank in group.ranks}) == 1


def uses_shared_memory(runtime: Runtime, group: Group, dtypes: Iterable[tf.DType]) -> bool:
    """Return whether a group's call on tensors of some dtypes goes entirely through shared memory; the same on
    every rank. Other modules ask this function which backend serves a call.
    """
    return shares_memory(runtime, group) and not any(map(hosts_of(runtime).uses_nccl, dtypes))


def backend_of(runtime: Runtime, group: Group, dtype: tf.DType) -> Backend:
    """Return the backend that moves a group's tensors of a dtype; the same on every rank."""
    return shared_memory if uses_shared_memory(runtime, group, [dtype]) else tensorflow_backend


def reducing_backend_of(runtime: Runtime, group: Group, dtype: tf.DType) -> ReducingBackend:
    """Return the backend for the calls that a group of several hosts can divide between its hosts."""
    if not hosts_of(runtime).uses_nccl(dtype) and two_level.has_levels(runtime, group):
        return two_level
    return backend_of(runtime, group, dtype)


def explained(runtime: Runtime, group: Group) -> str:
    """Return in words which backend reduces a group's gradients, and why."""
    hosts, backend = hosts_of(runtime), reducing_backend_of(runtime, group, tf.float32)
    if backend is shared_memory:
        return "shared memory: all ranks share that of one host"
    if backend is two_level:
        return "shared memory within each host, and TensorFlow's ring between them: hosts have several ranks"
    if not hosts.no_nccl:
        return "TensorFlow's collectives with NCCL: each rank has a GPU of its own"
    if environment.NPU_DEVICE_BACKEND.get() == "tensorflow":
        return "TensorFlow's ring over gRPC: NPU_DEVICE_BACKEND is tensorflow"
    why = "ranks of one host can't share memory" if any(hosts.problems) else "each rank has a host to itself"
    return f"TensorFlow's ring over gRPC: {why}"


def packs(runtime: Runtime, group: Group, dtype: tf.DType) -> bool:
    """Return whether a segment's tensors are packed into one buffer before they are sent."""
    return reducing_backend_of(runtime, group, dtype) is tensorflow_backend


def release(runtime: Runtime, name: str) -> None:
    """Free what is held for a group that is destroyed."""
    shared_memory.release(runtime, name)
    forget_watches(runtime, name)


def row_length(runtime: Runtime, group: Group, dtype: tf.DType, longest: tf.Tensor) -> tf.Tensor:
    """Return to how many elements rows of different lengths are padded, given the longest; the same on every rank."""
    return longest if backend_of(runtime, group, dtype) is shared_memory else lengths.rounded(longest)
