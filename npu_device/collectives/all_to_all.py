"""all_to_all: each rank's block i goes to rank i; equal blocks."""

from __future__ import annotations

import tensorflow as tf

from npu_device.cluster.runtime import Runtime
from npu_device.collectives import moving, shapes
from npu_device.collectives.agreement import collective
from npu_device.collectives.group import Group


@collective("all_to_all", "tensor")
def all_to_all(runtime: Runtime, tensor: tf.Tensor, group: Group) -> tf.Tensor:
    """Exchange equal blocks of the first dimension among all ranks.

    Args:
        runtime: the running cluster.
        tensor: shape [n, …] with n a multiple of the group's size, the same on every rank; any numeric dtype or bool.
        group: the group, of which this rank is a member.

    Returns:
        The same shape; block i is what rank i sent to this rank. Its gradient travels the other way.

    Raises:
        ValueError: a scalar, or n is not a multiple of the group's size.
        TypeError: a dtype that has no bits to send.
    """
    moved = moving.exchange(runtime, shapes.in_blocks("all_to_all", tensor, group), group)
    return shapes.with_first_dimension(moved, tensor, lambda rows: rows)
