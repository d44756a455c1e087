"""broadcast: every rank gets the root's tensors, in few large transfers instead of one a tensor."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from npu_device.cluster.runtime import Runtime
from npu_device.collectives import tensorflow_backend as backend
from npu_device.collectives import words
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
        tensors: of any shape and any numeric dtype or bool, with statically known shapes; the same shapes and dtypes
            on every rank.
        root_rank: the group rank whose values count.
        group: the group, of which this rank is a member.

    Returns:
        The root's values, in the order, shapes and dtypes of ``tensors``.

    Raises:
        ValueError: the root is not in the group, or a shape is not known.
        TypeError: a dtype that isn't made of bits of fixed size (strings, resources).
    """
    size = group.size
    if not 0 <= root_rank < size:
        raise ValueError(f"root_rank {root_rank} is not in group {group.name!r}; expected 0 to {size - 1}")
    with agreed(runtime, group, describe("broadcast", tensors, root=root_rank)):
        results: list[tf.Tensor] = []
        for transfer in _transfers(tensors):
            packed = words.pack(transfer)
            results.extend(words.unpack(backend.broadcast(runtime, packed, root_rank, group), transfer))
        return results


def _transfers(tensors: Sequence[tf.Tensor]) -> list[list[tf.Tensor]]:
    """Cut the list, in its order, into transfers of about ``TRANSFER_BYTES``."""
    transfers: list[list[tf.Tensor]] = []
    room = 0
    for tensor in tensors:
        size = words.count(tensor) * 4
        if not transfers or size > room:
            transfers.append([])
            room = TRANSFER_BYTES
        transfers[-1].append(tensor)
        room -= size
    return transfers
