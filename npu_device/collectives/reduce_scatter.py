"""reduce_scatter: each rank gets its block of what all_reduce would give."""

from __future__ import annotations

import tensorflow as tf

from npu_device.cluster.runtime import Runtime
from npu_device.collectives import moving, shapes
from npu_device.collectives.agreement import collective
from npu_device.collectives.all_reduce import require_reduction
from npu_device.collectives.dtypes import mean_dtype
from npu_device.collectives.group import Group

_REDUCE = {"sum": tf.reduce_sum, "min": tf.reduce_min, "max": tf.reduce_max, "prod": tf.reduce_prod}


@collective("reduce_scatter", "tensor", "reduction")
def reduce_scatter(runtime: Runtime, tensor: tf.Tensor, reduction: str, group: Group) -> tf.Tensor:
    """Reduce over a group, and give each rank its block of the first dimension.

    Args:
        runtime: the running cluster.
        tensor: shape [n, …] with n a multiple of the group's size, the same on every rank; float16, bfloat16, float32,
            float64, int8 to int64, uint8 to uint64.
        reduction: ``"sum"``, ``"mean"``, ``"min"``, ``"max"`` or ``"prod"``.
        group: the group, of which this rank is a member.

    Returns:
        Shape [n / group.size, …]: the block of this rank's number. The mean of integers is floating-point, as in
        ``all_reduce``. Differentiable.

    Raises:
        ValueError: another reduction, a scalar, or n is not a multiple of the group's size.
        TypeError: a dtype that can't be reduced.

    TensorFlow has no kernel for it on the CPU. The blocks are exchanged and each rank reduces its own, which moves half
    the bytes of an all_reduce.
    """
    require_reduction("reduce_scatter", tensor.dtype, reduction)
    blocks = moving.exchange(runtime, shapes.in_blocks("reduce_scatter", tensor, group), group)
    if reduction == "mean":
        reduced = tf.reduce_mean(tf.cast(blocks, mean_dtype(tensor.dtype)), axis=0)
    else:
        reduced = _REDUCE[reduction](blocks, axis=0)
    return shapes.with_first_dimension(reduced, tensor, lambda rows: rows // group.size)
