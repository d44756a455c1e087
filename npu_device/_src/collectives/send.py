"""send: one tensor from this rank to another one, which calls receive."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from npu_device._src.collectives.choice import backend_of
from npu_device._src.collectives.dtypes import require_bits
from npu_device._src.collectives.group import Group
from npu_device._src.collectives.operation import Declaration, collective
from npu_device._src.collectives.pair import pair_of
from npu_device._src.collectives.terms import Agreement


def _declare(tensor: tf.Tensor, tag: int, destination: int, group: Group) -> Declaration:
    require_bits(tensor.dtype)
    return Declaration("send and receive", pair_of(group, group.rank, destination, tag), [tensor], same={"tag": tag})


@collective(_declare, "tensor")
def send(agreement: Agreement, tensor: tf.Tensor, tag: int, destination: int, group: Group) -> Any:
    """Send a tensor to one other rank.

    Args:
        agreement: on this call; the caller passes the running cluster.
        tensor: any shape, any numeric dtype or bool.
        tag: pairs this call with the other side's ``receive``; each tag is a separate queue, first in, first out.
        destination: the group rank that receives.
        group: the group, of which both are members.

    Returns:
        In a graph the operation, for control dependencies; in eager mode None.

    Raises:
        ValueError: the destination isn't in the group, or is this rank.
        TypeError: a dtype that has no bits to send.

    In eager mode the call returns when the other rank has received. Ranks that all send first and receive afterwards
    then wait for each other forever; in one ``tf.function`` they don't, because the transfers run concurrently. There
    is no gradient: nothing of a send comes back to this rank.
    """
    pair = pair_of(group, group.rank, destination, tag)
    sent = backend_of(agreement, pair, tf.int32).send(agreement, tensor, pair)
    return None if tf.executing_eagerly() else sent.op
