"""all_to_all: each rank's block i goes to rank i; equal blocks."""

from __future__ import annotations

import tensorflow as tf

from npu_device._src.collectives import moving, shapes
from npu_device._src.collectives.dtypes import require_bits
from npu_device._src.collectives.group import Group
from npu_device._src.collectives.operation import Declaration, collective
from npu_device._src.collectives.terms import Agreement


def _declare(tensor: tf.Tensor, group: Group) -> Declaration:
    shapes.require_blocks("all_to_all", tensor, group)
    require_bits(tensor.dtype)
    return Declaration("all_to_all", group, [tensor], lambda: tf.TensorSpec(tensor.shape, tensor.dtype))


@collective(_declare, "tensor")
def all_to_all(agreement: Agreement, tensor: tf.Tensor, group: Group) -> tf.Tensor:
    """Exchange equal blocks of the first dimension among all ranks.

    Args:
        agreement: on this call; the caller passes the running cluster.
        tensor: shape [n, …] with n a multiple of the group's size, the same on every rank; any numeric dtype or bool.
        group: the group, of which this rank is a member.

    Returns:
        The same shape; block i is what rank i sent to this rank. Its gradient is sent the other way.

    Raises:
        ValueError: a scalar, or n is not a multiple of the group's size.
        TypeError: a dtype that has no bits to send.
    """
    moved = moving.exchange(agreement, shapes.in_blocks("all_to_all", tensor, group), group)
    return shapes.with_first_dimension(moved, tensor, lambda rows: rows)
