"""The first round of a program: the members' heads, and beside them so little data that no other round is needed.

It always has the same form, whatever the operation, so that members whose calls differ find that out. It is all of a
program whose data fits into it; the functions here return whether that was so.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from typing import Any, Optional, Protocol, Union

import numpy as np
import tensorflow as tf

from npu_device._src.collectives.backends.arrays.buffers import ALIGNMENT
from npu_device._src.collectives.backends.arrays.folding import folding
from npu_device._src.collectives.backends.arrays.heads import HEAD_WORDS, Head, compares, require_same
from npu_device._src.collectives.backends.arrays.stream import Stream

IsDone = Generator[Any, None, bool]

_HEAD_BYTES = 4 * HEAD_WORDS
_ROOM_OF_ALL_BYTES = 64 << 10
_LEAST_ROOM_BYTES = ALIGNMENT  # a scalar's
MOST_ROOM_BYTES = 1024


class Channel(Protocol):
    """The members, as far as the first round needs them.

    Attributes:
        size: number of members.
        rank: this member's number.
    """

    size: int
    rank: int

    def gather(self, row: np.ndarray) -> Generator[Any, None, np.ndarray]:
        """Return all members' rows, uint8, shape [size, n], given this member's, shape [n]."""


def room(members: int) -> int:
    """Return the largest size in bytes of a member's data that travels beside its head."""
    return min(MOST_ROOM_BYTES, max(_LEAST_ROOM_BYTES, _ROOM_OF_ALL_BYTES // members))


def fits(members: int, tensors: Sequence[Union[tf.Tensor, tf.TensorSpec]]) -> Union[bool, tf.Tensor]:
    """Return whether tensors fit into the first round: a bool tensor if only the running graph knows.

    A call without tensors moves a scalar.
    """
    known, unknown = 0 if tensors else ALIGNMENT, []
    for tensor in tensors:
        elements = tensor.shape.num_elements()
        if elements is None:
            unknown.append(tf.size(tensor, tf.int64) * tensor.dtype.size + ALIGNMENT)
        else:
            known += -(-elements * tensor.dtype.size // ALIGNMENT) * ALIGNMENT
    if known > room(members) or not unknown:
        return known <= room(members)
    return tf.add_n(unknown) + known <= room(members)


def all_reduce(
    channel: Channel,
    stream: Stream,
    arrays: Sequence[np.ndarray],
    result: np.ndarray,
    reduction: str,
    head: Head,
    counts: Optional[Sequence[int]] = None,
) -> IsDone:
    """Reduce a stream, as ``Programs`` says; ``counts``: how many ranks' sum each member's arrays are, default 1."""
    rows = yield from _rows(channel, stream, arrays, head)
    if rows is not None:
        folding(reduction, sum(counts or [1] * channel.size))(rows, result)
    return rows is not None


def reduce(
    channel: Channel,
    stream: Stream,
    arrays: Sequence[np.ndarray],
    result: Optional[np.ndarray],
    reduction: str,
    root: int,
    head: Head,
) -> IsDone:
    """Reduce a stream to the root, the only one with a ``result``."""
    del root
    rows = yield from _rows(channel, stream, arrays, head)
    if rows is not None and result is not None:
        folding(reduction, channel.size)(rows, result)
    return rows is not None


def broadcast(
    channel: Channel, stream: Stream, arrays: Sequence[np.ndarray], result: Optional[np.ndarray], root: int, head: Head
) -> IsDone:
    """Send the root's stream, of bytes, into the ``result`` of all other members."""
    rows = yield from _rows(channel, stream, arrays, head)
    if rows is not None and result is not None:
        result[:] = rows[root]
    return rows is not None


def all_gather(channel: Channel, row: np.ndarray, result: np.ndarray, head: Head) -> IsDone:
    """Gather all members' rows, shape [n], into ``result``, shape [size, n]."""
    rows = yield from _first_round(channel, row.view(np.uint8), head)
    if rows is not None:
        result.view(np.uint8)[:] = rows
    return rows is not None


def all_to_all(channel: Channel, rows: np.ndarray, result: np.ndarray, head: Head) -> IsDone:
    """Send row i of ``rows`` to member i, and receive row i of ``result`` from member i: both [size, n]."""
    everything = yield from _first_round(channel, rows.reshape(-1).view(np.uint8), head)
    if everything is not None:
        found = result.view(np.uint8)
        found[:] = everything.reshape(channel.size, *found.shape)[:, channel.rank]
    return everything is not None


def meet(channel: Channel, head: Head) -> Iterator[Any]:
    """Exchange only the heads."""
    yield from _first_round(channel, None, head)


def _rows(channel: Channel, stream: Stream, arrays: Sequence[np.ndarray], head: Head) -> Any:
    """Return all members' streams if they are small."""
    if stream.length * stream.dtype.itemsize > room(channel.size):
        yield from _first_round(channel, None, head)
        return None
    packed = np.zeros(stream.length, stream.dtype)
    if arrays:
        stream.copy_in(arrays, 0, packed)
    rows = yield from _first_round(channel, packed.view(np.uint8), head)
    return np.ascontiguousarray(rows).view(stream.dtype)


def _first_round(channel: Channel, mine: Optional[np.ndarray], head: Head) -> Any:
    """Compare the heads, if the ranks haven't agreed on the call; return all members' data if it is small.

    Args:
        channel: the members.
        mine: this member's bytes, or None for those of an operation with too many.
        head: this member's head.

    Raises:
        Mismatch: the heads differ.
    """
    size, space = 0 if mine is None else mine.nbytes, room(channel.size)
    if mine is None or size > space:
        if not compares(head):
            return None
        mine = None
    row = np.zeros(_HEAD_BYTES + (space if compares(head) else size), np.uint8)
    row[:_HEAD_BYTES] = np.array(head, np.int32).view(np.uint8)
    if mine is not None:
        row[_HEAD_BYTES : _HEAD_BYTES + size] = mine
    found = yield from channel.gather(row)
    require_same(found[:, :_HEAD_BYTES].copy().view(np.int32))
    return None if mine is None else found[:, _HEAD_BYTES : _HEAD_BYTES + size]
