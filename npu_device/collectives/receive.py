"""receive: the tensor that another rank sends to this one."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from npu_device.cluster.runtime import Runtime
from npu_device.collectives import backend
from npu_device.collectives.agreement import agreed, describe
from npu_device.collectives.dtypes import require_bits
from npu_device.collectives.group import Group
from npu_device.collectives.pair import pair_of


def receive(runtime: Runtime, shape: Any, dtype: tf.DType, tag: int, source: int, group: Group) -> tf.Tensor:
    """Receive a tensor from one other rank.

    Args:
        runtime: the running cluster.
        shape: the shape of what is sent, every dimension known.
        dtype: its dtype.
        tag: as in the other side's ``send``.
        source: the group rank that sends.
        group: the group, of which both are members.

    Returns:
        What was sent.

    Raises:
        ValueError: the source isn't in the group, or is this rank; a dimension of the shape is not known.
        TypeError: a dtype that has no bits to send.
    """
    pair = pair_of(group, source, group.rank, tag)
    like = tf.TensorSpec(shape, dtype)
    require_bits(like.dtype)
    if not like.shape.is_fully_defined():
        raise ValueError(f"receive needs to know every dimension of what comes; found shape {like.shape}")
    with agreed(runtime, pair, describe("send and receive", [like], tag=tag), [like]):
        return backend.receive(runtime, like, 1 - pair.rank, pair)
