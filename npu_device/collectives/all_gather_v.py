"""all_gather_v: every rank gets everybody's tensor, one after the other along the first dimension, which may differ
among ranks.
"""

from __future__ import annotations

import tensorflow as tf

from npu_device.cluster.runtime import Runtime
from npu_device.collectives import moving, shapes
from npu_device.collectives.agreement import collective
from npu_device.collectives.group import Group


@collective("all_gather_v", "tensor", ragged=True)
def all_gather_v(runtime: Runtime, tensor: tf.Tensor, group: Group) -> tf.Tensor:
    """Gather tensors whose first dimension may differ among the ranks.

    Args:
        runtime: the running cluster.
        tensor: shape [n, …] where n is each rank's own and the rest is the same everywhere; any numeric dtype or bool.
        group: the group, of which this rank is a member.

    Returns:
        Shape [sum of n, …], ordered by group rank, the same on every rank. Its gradient is the sum of everybody's
        incoming gradients of this rank's part. Each part travels padded to the longest.

    Raises:
        ValueError: a scalar.
        TypeError: a dtype that has no bits to send.
    """
    shapes.require_first_dimension("all_gather_v", tensor)
    row_shape = tf.shape(tensor)[1:]
    all_rows = moving.gather(runtime, tf.shape(tensor)[tf.newaxis, :1], group)[:, 0]
    counts = all_rows * tf.reduce_prod(row_shape)
    flat = tf.reshape(tensor, [1, -1])
    padded = tf.pad(flat, [[0, 0], [0, tf.reduce_max(counts) - tf.shape(flat)[1]]])
    gathered = moving.gather(runtime, padded, group)
    elements = tf.concat([gathered[rank, : counts[rank]] for rank in range(group.size)], axis=0)
    result = tf.reshape(elements, tf.concat([[tf.reduce_sum(all_rows)], row_shape], axis=0))
    result.set_shape([None, *tensor.shape[1:]] if tensor.shape.rank else None)
    return result
