"""receive: get the tensor that another rank sends to this one."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from npu_device._src.collectives.choice import through_backend
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
    """Receive the tensor that one other rank sends with the same tag.

    For arguments and errors see ``training.hccl_ops.receive``.
    """
    like, pair = tf.TensorSpec(shape, dtype), pair_of(group, source, group.rank, tag)
    return through_backend(agreement, pair, tf.int32, lambda backend, now: backend.receive(now, like, pair))
