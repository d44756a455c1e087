"""all_gather: every rank gets everybody's tensor, one after the other along the first dimension; equal shapes."""

from __future__ import annotations

import tensorflow as tf

from npu_device.cluster.runtime import Runtime
from npu_device.collectives import moving, shapes
from npu_device.collectives.agreement import collective
from npu_device.collectives.group import Group


@collective("all_gather", "tensor")
def all_gather(runtime: Runtime, tensor: tf.Tensor, group: Group) -> tf.Tensor:
    """Gather tensors of the same shape.

    Args:
        runtime: the running cluster.
        tensor: shape [n, …], the same on every rank; any numeric dtype or bool.
        group: the group, of which this rank is a member.

    Returns:
        Shape [n * group.size, …], ordered by group rank, the same on every rank. Its gradient is the sum of everybody's
        incoming gradients of this rank's part.

    Raises:
        ValueError: a scalar.
        TypeError: a dtype that has no bits to send.
    """
    shapes.require_first_dimension("all_gather", tensor)
    gathered = moving.gather(runtime, tf.reshape(tensor, [1, -1]), group)
    return shapes.with_first_dimension(gathered, tensor, lambda rows: rows * group.size)
