"""The one road that lists of tensors take to their reduction: packed by dtype into one collective each, handed back in
the caller's order.

``None`` stays ``None``, ``IndexedSlices`` are gathered.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Optional, Union

import tensorflow as tf

from npu_device.cluster.runtime import Runtime
from npu_device.collectives.agreement import agreed, describe
from npu_device.collectives.all_gather import all_gather_v
from npu_device.collectives.all_reduce import all_reduce
from npu_device.collectives.group import Group

Gradient = Optional[Union[tf.Tensor, tf.IndexedSlices]]


def reduce_list(
    runtime: Runtime, values: Sequence[Gradient], reduction: str, group: Group, *, fuse: bool = True
) -> list[Gradient]:
    """Reduce a list of tensors over a group.

    Args:
        runtime: the running cluster.
        values: dense tensors, ``IndexedSlices`` and ``None``, of the same kinds, shapes and dtypes on every rank;
            ``IndexedSlices`` may have another number of rows on each.
        reduction: as in ``all_reduce``; ``IndexedSlices`` know sum and mean only.
        group: the group, of which this rank is a member.
        fuse: pack the dense tensors of a dtype into one transfer.

    Returns:
        A list of the same length and order.

    Raises:
        ValueError: unknown reduction; min, max or prod of ``IndexedSlices``.
        TypeError: a dtype that can't be reduced.
    """
    call = describe("all_reduce", values, reduction=reduction, fused=fuse)
    with agreed(runtime, group, call, values):
        return _reduce(runtime, values, reduction, group, fuse)


def _reduce(runtime: Runtime, values: Sequence[Gradient], reduction: str, group: Group, fuse: bool) -> list[Gradient]:
    results: list[Gradient] = [None] * len(values)
    packs: dict[object, list[int]] = {}
    for index, value in enumerate(values):
        if isinstance(value, tf.IndexedSlices):
            results[index] = _reduce_slices(runtime, value, reduction, group)
        elif value is not None:
            packs.setdefault(value.dtype if fuse else index, []).append(index)
    for indices in packs.values():
        reduced = _reduce_pack(runtime, [values[index] for index in indices], reduction, group)
        for index, tensor in zip(indices, reduced):
            results[index] = tensor
    return results


def _reduce_pack(runtime: Runtime, tensors: Sequence[tf.Tensor], reduction: str, group: Group) -> list[tf.Tensor]:
    """Tensors of one dtype through one collective."""
    if len(tensors) == 1:
        return [all_reduce(runtime, tensors[0], reduction, group)]
    reduced = all_reduce(runtime, tf.concat([tf.reshape(tensor, [-1]) for tensor in tensors], axis=0), reduction, group)
    sizes = [tensor.shape.num_elements() for tensor in tensors]
    if None in sizes:
        sizes = tf.stack([tf.size(tensor) for tensor in tensors])
    parts = tf.split(reduced, sizes, num=len(tensors))
    results = []
    for part, tensor in zip(parts, tensors):
        known = tensor.shape.is_fully_defined()
        result = tf.reshape(part, tensor.shape if known else tf.shape(tensor))
        result.set_shape(tensor.shape)
        results.append(result)
    return results


def _reduce_slices(runtime: Runtime, slices: tf.IndexedSlices, reduction: str, group: Group) -> tf.IndexedSlices:
    if reduction not in ("sum", "mean"):
        raise ValueError(
            f"reduction {reduction!r} of IndexedSlices is not defined; expected 'sum' or 'mean', or dense tensors "
            "(tf.convert_to_tensor)"
        )
    values = all_gather_v(runtime, slices.values, group)
    if reduction == "mean":
        values = values / tf.cast(group.size, values.dtype)
    return tf.IndexedSlices(values, all_gather_v(runtime, slices.indices, group), slices.dense_shape)
