"""The operations as programs on a channel, in one round: the members' heads, and beside them little data.

The round always has the same form, whatever the operation, so that members whose calls differ find that out.
"""

from __future__ import annotations

import struct
from collections.abc import Generator, Sequence
from typing import Any, Optional, Union

import numpy as np
import tensorflow as tf

from npu_device._src.collectives.engines.host.arithmetic import folding
from npu_device._src.collectives.engines.host.queue import HEAD_WORDS, Head, Program, compares, require_same
from npu_device._src.collectives.engines.host.small_messages import SmallMessages
from npu_device._src.collectives.engines.host.stream import ALIGNMENT, Stream

_HEAD = struct.Struct(f"<{HEAD_WORDS}i")
_ROOM_OF_ALL_BYTES = 64 << 10
_LEAST_ROOM_BYTES = ALIGNMENT  # a scalar's
MOST_ROOM_BYTES = 1024


def room(members: int) -> int:
    """Return the largest size in bytes of a member's data that travels beside its head."""
    return min(MOST_ROOM_BYTES, max(_LEAST_ROOM_BYTES, _ROOM_OF_ALL_BYTES // members))


def fits(members: int, tensors: Sequence[Union[tf.Tensor, tf.TensorSpec]]) -> Union[bool, tf.Tensor]:
    """Return whether tensors fit into a message: a bool tensor if only the running graph knows. Ranks that have traced
    with different static shapes come to the same answer.

    A call without tensors moves a scalar.
    """
    known, unknown = 0 if tensors else ALIGNMENT, []
    for tensor in tensors:
        elements = tensor.shape.num_elements()
        if elements is None:
            unknown.append(_aligned(tf.size(tensor, tf.int64) * tensor.dtype.size))
        else:
            known += _aligned(elements * tensor.dtype.size)
    if known > room(members) or not unknown:
        return known <= room(members)
    return tf.add_n(unknown) + known <= room(members)


def _aligned(size: Any) -> Any:
    return -(-size // ALIGNMENT) * ALIGNMENT


def all_reduce(channel: SmallMessages, stream: Stream, result: np.ndarray, reduction: str, head: Head) -> Program:
    """Reduce a stream; ``result`` is as long as the stream, and may be of another dtype."""
    rows = yield from _rows(channel, stream, head)
    folding(reduction, channel.size)(rows, result)


def reduce(
    channel: SmallMessages, stream: Stream, result: Optional[np.ndarray], reduction: str, root: int, head: Head
) -> Program:
    """Reduce a stream to the root, the only one with a ``result``."""
    del root
    rows = yield from _rows(channel, stream, head)
    if result is not None:
        folding(reduction, channel.size)(rows, result)


def broadcast(channel: SmallMessages, stream: Stream, result: Optional[np.ndarray], root: int, head: Head) -> Program:
    """Send the root's stream, of bytes, into the ``result`` of all other members."""
    rows = yield from _rows(channel, stream, head)
    if result is not None:
        result[:] = rows[root]


def all_gather(channel: SmallMessages, row: np.ndarray, result: np.ndarray, head: Head) -> Program:
    """Gather all members' rows, shape [n], into ``result``, shape [size, n]."""
    rows = yield from _round(channel, row, head)
    for number, found in enumerate(rows):
        result[number] = np.frombuffer(found, result.dtype)


def all_to_all(channel: SmallMessages, rows: np.ndarray, result: np.ndarray, head: Head) -> Program:
    """Send row i of ``rows`` to member i, and receive row i of ``result`` from member i: both [size, n]."""
    everything = yield from _round(channel, rows, head)
    for number, found in enumerate(everything):
        result[number] = np.frombuffer(found, result.dtype).reshape(result.shape)[channel.rank]


def meet(channel: SmallMessages, head: Head) -> Program:
    """Exchange only the heads, if the ranks haven't agreed on the call."""
    if compares(head):
        yield from _round(channel, np.empty(0, np.uint8), head)


def _rows(channel: SmallMessages, stream: Stream, head: Head) -> Generator[int, None, list[np.ndarray]]:
    """Return all members' streams."""
    packed = np.zeros(stream.length, stream.dtype)
    stream.copy_in(0, packed)
    rows = yield from _round(channel, packed, head)
    return [np.frombuffer(row, stream.dtype) for row in rows]


def _round(channel: SmallMessages, mine: np.ndarray, head: Head) -> Generator[int, None, list[bytes]]:
    """Compare the heads, if the ranks haven't agreed on the call; return all members' data, by member.

    Args:
        channel: the members.
        mine: this member's data, of the same size on all.
        head: this member's head.

    Raises:
        Mismatch: the heads differ.
    """
    space = room(channel.size)
    if mine.nbytes > space:
        raise AssertionError(f"{mine.nbytes} bytes don't fit into a message; choice.route_of is wrong")
    row = _HEAD.pack(*head) + mine.tobytes()
    end = len(row)
    rows = yield from channel.gather(row.ljust(_HEAD.size + space, b"\0") if compares(head) else row)
    require_same([_HEAD.unpack_from(row) for row in rows])
    return [row[_HEAD.size : end] for row in rows]
