"""Which backend serves a group, and the calls that both have: the operations ask here.

A group whose ranks share memory uses that; one that spans hosts, some of which have several of its ranks, adds up and
spreads on each host in shared memory and goes through TensorFlow between them; everything else is TensorFlow's.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Callable, cast

import tensorflow as tf

from npu_device import _compat
from npu_device.cluster.runtime import Runtime
from npu_device.collectives import two_level
from npu_device.collectives.group import Group
from npu_device.collectives.shared_memory import backend as shared_memory
from npu_device.collectives.shared_memory.host import hosts_of
from npu_device.collectives.tensorflow_backend import backend as tensorflow_backend


def shares_memory(runtime: Runtime, group: Group) -> bool:
    """Whether all ranks of a group share memory; the same on each of them."""
    leaders = hosts_of(runtime).leaders
    return len({leaders[rank] for rank in group.ranks}) == 1


def packs(runtime: Runtime, group: Group, dtype: tf.DType) -> bool:
    """Whether a segment's tensors are put into one buffer before they travel, and the result is taken apart again."""
    return _for_tensors(runtime, group, dtype) is tensorflow_backend


def start_all_reduce(
    runtime: Runtime,
    segments: Sequence[Sequence[tf.Tensor]],
    reduction: str,
    group: Group,
    wire: tf.DType | None = None,
) -> Sequence[Callable[[], list[tf.Tensor]]]:
    """Begin to reduce segments; what each rests on is all that it waits for.

    Args:
        runtime: the running cluster.
        segments: lists of tensors of one dtype, of the same shapes on every rank.
        reduction: ``"sum"``, ``"mean"``, ``"min"``, ``"max"`` or ``"prod"``; a mean of integers is floating-point.
        group: the group.
        wire: dtype of floating-point tensors while they travel; default their own.

    Returns:
        For each segment a function to be called once, in this order, which gives the results.
    """
    chosen = _for_tensors(runtime, group, segments[0][0].dtype)
    return cast(
        "Sequence[Callable[[], list[tf.Tensor]]]", chosen.start_all_reduce(runtime, segments, reduction, group, wire)
    )


def all_reduce(runtime: Runtime, tensor: tf.Tensor, reduction: str, group: Group) -> tf.Tensor:
    """One tensor; see ``start_all_reduce``."""
    [finish] = start_all_reduce(runtime, [[tensor]], reduction, group)
    return finish()[0]


def reduce(runtime: Runtime, tensor: tf.Tensor, reduction: str, root: int, group: Group) -> tf.Tensor:
    """Reduce to one rank; what the others get has the result's shape and dtype and means nothing."""
    return _for_tensors(runtime, group, tensor.dtype).reduce(runtime, [tensor], reduction, root, group)[0]


def broadcast(runtime: Runtime, tensors: Sequence[tf.Tensor], root: int, group: Group) -> list[tf.Tensor]:
    """The root's tensors on every rank; the shapes and dtypes are the same everywhere."""
    return _for_tensors(runtime, group, tf.int32).broadcast(runtime, tensors, root, group)


def receive(runtime: Runtime, like: tf.TensorSpec, root: int, group: Group) -> tf.Tensor:
    """What the root of a group of two broadcasts, on the other one, which knows its shape and dtype."""
    return _for_moves(runtime, group, tf.int32).receive(runtime, like, root, group)


def all_gather(runtime: Runtime, row: tf.Tensor, group: Group) -> tf.Tensor:
    """Everybody's row on every rank: [n] in, [group.size, n] out; n is the same on all ranks."""
    return _for_moves(runtime, group, row.dtype).all_gather(runtime, row, group)


def all_to_all(runtime: Runtime, rows: tf.Tensor, group: Group) -> tf.Tensor:
    """Row i goes to rank i, and row i of the result comes from rank i: [group.size, n] in and out."""
    return _for_moves(runtime, group, rows.dtype).all_to_all(runtime, rows, group)


def _for_tensors(runtime: Runtime, group: Group, dtype: tf.DType) -> ModuleType:
    chosen = _for_moves(runtime, group, dtype)
    if chosen is tensorflow_backend and not _on_gpu(dtype) and two_level.has_levels(runtime, group):
        return two_level
    return chosen


def _for_moves(runtime: Runtime, group: Group, dtype: tf.DType) -> ModuleType:
    if shares_memory(runtime, group) and not _on_gpu(dtype) and not _compat.compiled_by_xla():
        return shared_memory
    return tensorflow_backend


def _on_gpu(dtype: tf.DType) -> bool:
    """Whether tensors of the dtype live in the ranks' GPUs, where there are some."""
    return bool(dtype.is_floating and tf.config.get_visible_devices("GPU"))
