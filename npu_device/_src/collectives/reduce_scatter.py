"""reduce_scatter: each rank gets its block of the result of all_reduce."""

from __future__ import annotations

import tensorflow as tf

from npu_device._src.collectives import moving, shapes
from npu_device._src.collectives.all_reduce import require_reduction
from npu_device._src.collectives.dtypes import reduced_dtype
from npu_device._src.collectives.folding import fold
from npu_device._src.collectives.group import Group
from npu_device._src.collectives.operation import Declaration, collective
from npu_device._src.collectives.terms import Agreement


def _declare(tensor: tf.Tensor, reduction: str, group: Group) -> Declaration:
    require_reduction("reduce_scatter", tensor.dtype, reduction)
    shapes.require_blocks("reduce_scatter", tensor, group)

    def results() -> tf.TensorSpec:
        block = shapes.spec_with_first_dimension(tensor, lambda rows: rows // group.size)
        return tf.TensorSpec(block.shape, reduced_dtype(tensor.dtype, reduction))

    return Declaration("reduce_scatter", group, [tensor], results, {"reduction": reduction})


@collective(_declare, "tensor")
def reduce_scatter(agreement: Agreement, tensor: tf.Tensor, reduction: str, group: Group) -> tf.Tensor:
    """Reduce over a group, and give each rank its block of the first dimension.

    Args:
        agreement: on this call; the caller passes the running cluster.
        tensor: shape [n, …] with n a multiple of the group's size, the same on every rank; float16, bfloat16, float32,
            float64, int8 to int64, uint8 to uint64.
        reduction: ``"sum"``, ``"mean"``, ``"min"``, ``"max"`` or ``"prod"``.
        group: the group, of which this rank is a member.

    Returns:
        Shape [n / group.size, …]: the block of this rank's number. The mean of integers is floating-point, as in
        ``all_reduce``; on ranks that share memory it is bit by bit the block of ``all_reduce``. Differentiable.

    Raises:
        ValueError: an unknown reduction, a scalar, or n is not a multiple of the group's size.
        TypeError: a dtype that can't be reduced.

    TensorFlow has no kernel for it on the CPU. The blocks are exchanged and each rank reduces its own, which moves half
    the bytes of an all_reduce.
    """
    blocks = moving.exchange(agreement, shapes.in_blocks("reduce_scatter", tensor, group), group)
    reduced = fold(tf.unstack(blocks, num=group.size), reduction)
    return shapes.with_first_dimension(reduced, tensor, lambda rows: rows // group.size)
