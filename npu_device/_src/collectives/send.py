"""send: one tensor from this rank to another one, which calls receive."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from npu_device._src.collectives.choice import through_backend
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
    """Send a tensor to one other rank; return the operation in a graph, and None in eager mode.

    A graph uses the operation for control dependencies. Each tag is a separate queue, first in, first out. There is no
    gradient: nothing of a send comes back to this rank. For arguments, errors and deadlocks see
    ``training.hccl_ops.send``.
    """
    pair = pair_of(group, group.rank, destination, tag)
    sent = through_backend(agreement, pair, tf.int32, lambda backend, now: backend.send(now, tensor, pair))
    return None if tf.executing_eagerly() else sent.op
