"""reduce: the root gets the sum, mean, min, max or product of everybody's tensor."""

from __future__ import annotations

import tensorflow as tf

from npu_device.cluster.runtime import Runtime
from npu_device.collectives import backend, moving, shapes
from npu_device.collectives.agreement import collective
from npu_device.collectives.all_reduce import require_reduction
from npu_device.collectives.group import Group


@collective("reduce", "tensor", "reduction", "root_rank")
def reduce(runtime: Runtime, tensor: tf.Tensor, reduction: str, root_rank: int, group: Group) -> tf.Tensor:
    """Reduce one dense tensor over a group to its root.

    Args:
        runtime: the running cluster.
        tensor: as in ``all_reduce``.
        reduction: ``"sum"``, ``"mean"``, ``"min"``, ``"max"`` or ``"prod"``.
        root_rank: the group rank that gets the result.
        group: the group, of which this rank is a member.

    Returns:
        On the root, what ``all_reduce`` gives. On the others zeros of the same shape and dtype, so that what means
        nothing can't be taken for a result. Sum and mean of floating-point tensors are differentiable: every rank's
        gradient is the root's incoming gradient, or its share.

    Raises:
        ValueError: another reduction, or the root is not in the group.
        TypeError: a dtype that can't be reduced.

    TensorFlow can't reduce to one rank only: between hosts this moves as many bytes as ``all_reduce``.
    """
    require_reduction("reduce", tensor.dtype, reduction)
    shapes.require_member("root_rank", root_rank, group)

    def forward(value: tf.Tensor) -> tf.Tensor:
        reduced = backend.reduce(runtime, value, reduction, root_rank, group)
        if group.rank == root_rank:
            return reduced
        with tf.control_dependencies([reduced]):
            return tf.zeros_like(reduced)

    def backward(upstream: tf.Tensor) -> tf.Tensor:
        from npu_device.collectives.broadcast import broadcast  # each is the other's gradient

        if reduction not in ("sum", "mean"):
            raise LookupError(
                f"reduce has no gradient for reduction {reduction!r}; it is differentiable for 'sum' and 'mean'"
            )
        [incoming] = broadcast(runtime, [upstream], root_rank, group)
        return incoming * tf.cast(1.0 / group.size, incoming.dtype) if reduction == "mean" else incoming

    return moving.differentiable(forward, backward, tensor)
