"""reduce: the root gets the sum, mean, min, max or product of all ranks' tensors."""

from __future__ import annotations

import tensorflow as tf

from npu_device._src.collectives import moving, shapes
from npu_device._src.collectives.all_reduce import require_differentiable, require_reduction
from npu_device._src.collectives.choice import reducing_backend_of
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
    """Reduce one dense tensor over a group to its root.

    Args:
        agreement: on this call; the caller passes the running cluster.
        tensor: as in ``all_reduce``.
        reduction: ``"sum"``, ``"mean"``, ``"min"``, ``"max"`` or ``"prod"``.
        root_rank: the group rank that gets the result.
        group: the group, of which this rank is a member.

    Returns:
        On the root, what ``all_reduce`` gives. On the others zeros of the same shape and dtype, so that a value without
        meaning can't be mistaken for a result. Sum and mean of floating-point tensors are differentiable: every rank's
        gradient is the root's incoming gradient, or its share.

    Raises:
        ValueError: an unknown reduction, or the root is not in the group.
        TypeError: a dtype that can't be reduced.

    TensorFlow can't reduce to one rank only: between hosts this moves as many bytes as ``all_reduce``.
    """

    backend = reducing_backend_of(agreement, group, tensor.dtype)

    def forward(value: tf.Tensor) -> tf.Tensor:
        [reduced] = backend.reduce(agreement, [value], reduction, root_rank, group)
        if group.rank == root_rank:
            return reduced
        with tf.control_dependencies([reduced]):
            return tf.zeros_like(reduced)

    def backward(upstream: tf.Tensor) -> tf.Tensor:
        from npu_device._src.collectives.broadcast import broadcast  # each is the other's gradient

        require_differentiable("reduce", reduction)
        [incoming] = broadcast(agreement.runtime, [upstream], root_rank, group)
        return incoming / group.size if reduction == "mean" else incoming

    return moving.differentiable_move(forward, backward, tensor)
