"""all_gather_v: every rank gets the tensors of all ranks, concatenated along the first dimension, which may differ
among ranks.
"""

from __future__ import annotations

import tensorflow as tf

from npu_device._src.collectives import moving, shapes
from npu_device._src.collectives.choice import row_length
from npu_device._src.collectives.dtypes import require_bits
from npu_device._src.collectives.group import Group
from npu_device._src.collectives.operation import Declaration, collective
from npu_device._src.collectives.terms import Agreement


def _declare(tensor: tf.Tensor, group: Group, purpose: str = "") -> Declaration:
    shapes.require_first_dimension("all_gather_v", tensor)
    require_bits(tensor.dtype)

    def results() -> tf.TensorSpec:
        return shapes.spec_with_first_dimension(tensor, lambda _: None)

    same = {"purpose": purpose} if purpose else {}
    return Declaration("all_gather_v", group, [tensor], results, same, ragged=True)


@collective(_declare, "tensor")
def all_gather_v(agreement: Agreement, tensor: tf.Tensor, group: Group, purpose: str = "") -> tf.Tensor:
    """Gather tensors whose first dimension may differ among the ranks.

    Args:
        agreement: on this call; the caller passes the job.
        tensor: shape [n, …] where n is each rank's own and the rest is the same everywhere; any numeric dtype or bool.
        group: the group, of which this rank is a member.
        purpose: what the tensors are for; the same on every rank, so that unrelated calls aren't taken for one.

    Returns:
        Shape [sum of n, …], ordered by group rank, the same on every rank. Its gradient is the sum of all ranks'
        incoming gradients of this rank's part. Each part is sent padded to the longest.

    Raises:
        ValueError: a scalar.
        TypeError: a dtype that has no bits to send.
    """
    del purpose  # the ranks have compared it
    return gather_ragged(agreement, tensor, group)


def gather_ragged(agreement: Agreement, tensor: tf.Tensor, group: Group) -> tf.Tensor:
    """Do the same as ``all_gather_v``, as part of an operation on which the ranks have agreed."""
    row_shape = tf.shape(tensor)[1:]
    all_rows = moving.gather(agreement, tf.shape(tensor)[tf.newaxis, :1], group)[:, 0]
    counts = all_rows * tf.reduce_prod(row_shape)
    flat = tf.reshape(tensor, [1, -1])
    longest = row_length(agreement.job, group, tensor.dtype, tf.reduce_max(counts))
    padded = tf.pad(flat, [[0, 0], [0, longest - tf.shape(flat)[1]]])
    gathered = moving.gather(agreement, padded, group)
    elements = tf.concat([gathered[rank, : counts[rank]] for rank in range(group.size)], axis=0)
    result = tf.reshape(elements, tf.concat([[tf.reduce_sum(all_rows)], row_shape], axis=0))
    result.set_shape([None, *tensor.shape[1:]] if tensor.shape.rank else None)
    return result
