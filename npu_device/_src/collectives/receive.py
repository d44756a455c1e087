"""receive: get the tensor that another rank sends to this one."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from npu_device._src.collectives.choice import backend_of
from npu_device._src.collectives.dtypes import require_bits
from npu_device._src.collectives.group import Group
from npu_device._src.collectives.operation import Declaration, collective
from npu_device._src.collectives.pair import pair_of
from npu_device._src.collectives.terms import Agreement


def _declare(shape: Any, dtype: tf.DType, tag: int, source: int, group: Group) -> Declaration:
    like = tf.TensorSpec(shape, dtype)
    require_bits(like.dtype)
    if not like.shape.is_fully_defined():
        raise ValueError(f"receive needs to know every dimension of the tensor; found shape {like.shape}")
    return Declaration("send and receive", pair_of(group, source, group.rank, tag), [like], lambda: like, {"tag": tag})


@collective(_declare)
def receive(agreement: Agreement, shape: Any, dtype: tf.DType, tag: int, source: int, group: Group) -> tf.Tensor:
    """Receive a tensor from one other rank.

    Args:
        agreement: on this call; the caller passes the running cluster.
        shape: the shape of the tensor, every dimension known.
        dtype: its dtype.
        tag: as in the other side's ``send``.
        source: the group rank that sends.
        group: the group, of which both are members.

    Returns:
        The tensor that was sent.

    Raises:
        ValueError: the source isn't in the group, or is this rank; a dimension of the shape is not known.
        TypeError: a dtype that has no bits to send.
    """
    pair = pair_of(group, source, group.rank, tag)
    return backend_of(agreement, pair, tf.int32).receive(agreement, tf.TensorSpec(shape, dtype), pair)
