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
    """Gather tensors of one shape, [n, …], into [n * group.size, …], ordered by group rank and the same on every rank.

    The gradient is the sum of all ranks' incoming gradients of this rank's part. For arguments and errors see
    ``training.hccl_ops.allgather``.
    """
    gathered = moving.gather(agreement, tf.reshape(tensor, [1, -1]), group)
    return shapes.with_first_dimension(gathered, tensor, lambda rows: rows * group.size)
