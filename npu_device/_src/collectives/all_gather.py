"""all_gather: every rank gets the tensors of all ranks, concatenated along the first dimension; equal shapes."""

from __future__ import annotations

import tensorflow as tf

from npu_device._src.collectives import moving, shapes
from npu_device._src.collectives.dtypes import require_bits
from npu_device._src.collectives.group import Group
from npu_device._src.collectives.operation import Declaration, collective
from npu_device._src.collectives.terms import Agreement


def _declare(tensor: tf.Tensor, group: Group) -> Declaration:
    shapes.require_first_dimension("all_gather", tensor)
    require_bits(tensor.dtype)
    return Declaration(
        "all_gather", group, [tensor], lambda: shapes.spec_with_first_dimension(tensor, lambda rows: rows * group.size)
    )


@collective(_declare, "tensor")
def all_gather(agreement: Agreement, tensor: tf.Tensor, group: Group) -> tf.Tensor:
    """Gather tensors of the same shape.

    Args:
        agreement: on this call; the caller passes the running cluster.
        tensor: shape [n, …], the same on every rank; any numeric dtype or bool.
        group: the group, of which this rank is a member.

    Returns:
        Shape [n * group.size, …], ordered by group rank, the same on every rank. Its gradient is the sum of all ranks'
        incoming gradients of this rank's part.

    Raises:
        ValueError: a scalar.
        TypeError: a dtype that has no bits to send.
    """
    gathered = moving.gather(agreement, tf.reshape(tensor, [1, -1]), group)
    return shapes.with_first_dimension(gathered, tensor, lambda rows: rows * group.size)
