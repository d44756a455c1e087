"""reduce: the root gets the sum, mean, min, max or product of all ranks' tensors."""

from __future__ import annotations

import tensorflow as tf

from npu_device._src.collectives import moving, shapes
from npu_device._src.collectives.all_reduce import require_differentiable, require_reduction
from npu_device._src.collectives.choice import through_reducing_backend
from npu_device._src.collectives.dtypes import reduced_dtype
from npu_device._src.collectives.group import Group
from npu_device._src.collectives.operation import Declaration, collective
from npu_device._src.collectives.terms import Agreement


def _declare(tensor: tf.Tensor, reduction: str, root_rank: int, group: Group) -> Declaration:
    require_reduction("reduce", tensor.dtype, reduction)
    shapes.require_member("root_rank", root_rank, group)
    return Declaration(
        "reduce",
        group,
        [tensor],
        lambda: tf.TensorSpec(tensor.shape, reduced_dtype(tensor.dtype, reduction)),
        {"reduction": reduction, "root_rank": root_rank},
    )


@collective(_declare, "tensor")
def reduce(agreement: Agreement, tensor: tf.Tensor, reduction: str, root_rank: int, group: Group) -> tf.Tensor:
    """Reduce one dense tensor over a group to its root; the arguments are those of ``all_reduce``.

    The root gets what ``all_reduce`` gives, the others zeros of the same shape and dtype, so that a value without
    meaning can't be mistaken for a result. Sum and mean of floating-point tensors are differentiable: every rank's
    gradient is the root's incoming gradient, or its share.

    TensorFlow can't reduce to one rank only: between hosts this moves as many bytes as ``all_reduce``.
    """
    [reduced] = through_reducing_backend(
        agreement, group, tensor.dtype, lambda backend, now: backend.reduce(now, [tensor], reduction, root_rank, group)
    )
    if group.rank != root_rank:
        with tf.control_dependencies([reduced]):
            reduced = tf.zeros_like(reduced)

    def backward(upstream: tf.Tensor) -> tf.Tensor:
        from npu_device._src.collectives.broadcast import broadcast  # each is the other's gradient

        require_differentiable("reduce", reduction)
        [incoming] = broadcast(agreement.job, [upstream], root_rank, group)
        return incoming / group.size if reduction == "mean" else incoming

    return moving.differentiable_move(reduced, backward, tensor)
