"""send: one tensor from this rank to another one, which calls receive."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from npu_device.cluster.runtime import Runtime
from npu_device.collectives import backend
from npu_device.collectives.agreement import agreed, describe
from npu_device.collectives.dtypes import require_bits
from npu_device.collectives.group import Group
from npu_device.collectives.pair import pair_of


def send(runtime: Runtime, tensor: tf.Tensor, tag: int, destination: int, group: Group) -> Any:
    """Send a tensor to one other rank.

    Args:
        runtime: the running cluster.
        tensor: any shape, any numeric dtype or bool.
        tag: what pairs this call with the other side's ``receive``; each tag is a queue of its own, first in first out.
        destination: the group rank that receives.
        group: the group, of which both are members.

    Returns:
        In a ``tf.function`` the operation, for control dependencies; in eager mode None.

    Raises:
        ValueError: the destination isn't in the group, or is this rank.
        TypeError: a dtype that has no bits to send.

    In eager mode the call returns when the other rank has received. Ranks that all send first and receive afterwards
    wait for each other for ever then; in one ``tf.function`` they don't, because the transfers run side by side. There
    is no gradient: nothing of the send comes back to this rank.
    """
    pair = pair_of(group, group.rank, destination, tag)
    require_bits(tensor.dtype)
    with agreed(runtime, pair, describe("send and receive", [tensor], tag=tag), [tensor]):
        [sent] = backend.broadcast(runtime, [tensor], pair.rank, pair)
    return None if tf.executing_eagerly() else sent.op
