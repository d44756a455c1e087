"""broadcast: every rank gets the root's tensors, in few large transfers instead of one a tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from npu_device.cluster.runtime import Runtime
from npu_device.collectives import shapes, words
from npu_device.collectives import tensorflow_backend as backend
from npu_device.collectives.agreement import agreed, describe
from npu_device.collectives.group import Group

TRANSFER_BYTES = 64 << 20
"""About how much goes into one transfer: large enough for the full bandwidth, small enough not to double a large
model's memory.
"""


def broadcast(runtime: Runtime, tensors: Sequence[tf.Tensor], root_rank: int, group: Group) -> list[tf.Tensor]:
    """Send the root's tensors to every rank of the group.

    Args:
        runtime: the running cluster.
        tensors: of any shape and any numeric dtype or bool; the same shapes and dtypes on every rank.
        root_rank: the group rank whose values count.
        group: the group, of which this rank is a member.

    Returns:
        The root's values, in the order, shapes and dtypes of ``tensors``. Differentiable: the root's gradient is the
        sum of everybody's incoming gradient, the others' is zero.

    Raises:
        ValueError: the root is not in the group.
        TypeError: a dtype that isn't made of bits of fixed size (strings, resources).
    """
    shapes.require_member("root_rank", root_rank, group)
    if not tensors:
        return []

    def backward(*upstream: tf.Tensor) -> list[tf.Tensor | None]:
        from npu_device.collectives.reduce import reduce  # each is the other's gradient

        return [
            reduce(runtime, value, "sum", root_rank, group) if tensor.dtype.is_floating else None
            for value, tensor in zip(upstream, tensors)
        ]

    @tf.custom_gradient
    def differentiable(*values: tf.Tensor) -> tuple[list[tf.Tensor], Any]:
        return _send(runtime, values, root_rank, group), backward

    with agreed(runtime, group, describe("broadcast", tensors, root_rank=root_rank), tensors):
        return list(differentiable(*tensors))


def _send(runtime: Runtime, tensors: Sequence[tf.Tensor], root_rank: int, group: Group) -> list[tf.Tensor]:
    results: list[tf.Tensor] = []
    for transfer in _transfers(tensors):
        received = shapes.with_an_element(
            lambda vector: backend.broadcast(runtime, vector, root_rank, group), words.pack(transfer)
        )
        results.extend(words.unpack(received, transfer))
    return results


def _transfers(tensors: Sequence[tf.Tensor]) -> list[list[tf.Tensor]]:
    """Cut the list, in its order, into transfers of about ``TRANSFER_BYTES``. A tensor of unknown size goes alone."""
    transfers: list[list[tf.Tensor]] = []
    room = 0
    for tensor in tensors:
        count = words.count(tensor)
        size = count * 4 if isinstance(count, int) else TRANSFER_BYTES
        if not transfers or size > room:
            transfers.append([])
            room = TRANSFER_BYTES
        transfers[-1].append(tensor)
        room -= size
    return transfers
