"""The operations as programs on a channel: which rounds there are, who publishes what in them, who reads it.

A program is a generator that yields only where it would have to wait (see ``Channel.advance``). Reductions add up in
the order of the ranks, element by element, so that every rank gets the same bits, however the data was cut into
messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Callable, Optional

import numpy as np

from npu_device.collectives.shared_memory.channel import Channel, Waiting
from npu_device.collectives.shared_memory.stream import Stream

Head = Optional[Sequence[int]]
"""What a member says about a job; the first rounds of a job carry it, and it must be the same on all members."""

_FOLDS: dict[str, Any] = {"sum": np.add, "mean": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum}

# How many slots a member publishes before it reads. More lets the ranks run further apart; but what it published
# itself should still be in its core's cache when it reads it.
_AHEAD = 8

# From how many bytes on three ranks or more share the work of a reduction, instead of each doing all of it with one
# round trip less. Two ranks have nothing to share: adding up half and copying the other half is as much as adding all.
_SHARED_FROM_BYTES = 64 << 10

# How many slots of a shared reduction are added up before their results are handed round; they stay in the cache.
_SHARED_SLOTS = 8


class Mismatch(Exception):
    """The members' heads of a job differ. All find it in the same step, before anything is read."""


def all_reduce(
    channel: Channel, stream: Stream, arrays: Sequence[np.ndarray], result: np.ndarray, reduction: str, head: Head
) -> Waiting:
    """Reduce a stream; ``result`` is as long as the stream, and may be of another dtype."""
    fold = _folding(reduction, channel.size)
    length = stream.length
    if channel.size == 2 or length * stream.dtype.itemsize <= _SHARED_FROM_BYTES:
        yield from _reduce_all(channel, stream, arrays, result, fold, head)
        return
    chunk = channel.slot_bytes // stream.dtype.itemsize // channel.size * channel.size
    for first in range(0, length, chunk * _SHARED_SLOTS):
        last = min(length, first + chunk * _SHARED_SLOTS)
        yield from _reduce_shared(channel, stream, arrays, result, fold, (first, last, chunk), head)
        head = None


def reduce(
    channel: Channel,
    stream: Stream,
    arrays: Sequence[np.ndarray],
    result: np.ndarray | None,
    reduction: str,
    head: Head,
) -> Waiting:
    """Reduce a stream to one member, the only one with a ``result``."""
    fold = _folding(reduction, channel.size)
    yield from _reduce_all(channel, stream, arrays, result, fold, head)


def broadcast(
    channel: Channel, stream: Stream, arrays: Sequence[np.ndarray], result: np.ndarray | None, root: int, head: Head
) -> Waiting:
    """Send the root's stream into everybody else's ``result``."""
    chunk = channel.slot_bytes // stream.dtype.itemsize

    def fill(number: int, slot: np.ndarray) -> None:
        stream.copy_in(arrays, number * chunk, slot)

    def read(number: int, slots: np.ndarray) -> None:
        if result is not None:
            part = result[number * chunk : (number + 1) * chunk]
            part[:] = slots[root, : len(part)]

    yield from _rounds(channel, stream.dtype, _count(stream.length, chunk), [root], fill, read, head)


def all_gather(channel: Channel, row: np.ndarray, result: np.ndarray, head: Head) -> Waiting:
    """Everybody's row, shape [n], into ``result``, shape [size, n]."""
    chunk = channel.slot_bytes // row.dtype.itemsize

    def fill(number: int, slot: np.ndarray) -> None:
        part = row[number * chunk : (number + 1) * chunk]
        slot[: len(part)] = part

    def read(number: int, slots: np.ndarray) -> None:
        part = result[:, number * chunk : (number + 1) * chunk]
        part[:] = slots[:, : part.shape[1]]

    yield from _rounds(channel, row.dtype, _count(len(row), chunk), range(channel.size), fill, read, head)


def all_to_all(channel: Channel, rows: np.ndarray, result: np.ndarray, head: Head) -> Waiting:
    """Row i of ``rows`` to member i, row i of ``result`` from member i: both [size, n]."""

    def read(mine: np.ndarray, first: int) -> None:
        result[:, first : first + mine.shape[1]] = mine

    yield from _rows(channel, rows, read, head)


def reduce_scatter(channel: Channel, rows: np.ndarray, result: np.ndarray, reduction: str, head: Head) -> Waiting:
    """Everybody's row i, reduced, to member i: ``rows`` is [size, n], ``result`` [n]."""
    fold = _folding(reduction, channel.size)

    def read(mine: np.ndarray, first: int) -> None:
        fold(mine, result[first : first + mine.shape[1]])

    yield from _rows(channel, rows, read, head)


def meet(channel: Channel, head: Head) -> Waiting:
    """Nothing but the heads."""
    yield from _rounds(channel, np.dtype(np.uint8), 1, [], _nothing, _nothing, head)


def _reduce_all(
    channel: Channel,
    stream: Stream,
    arrays: Sequence[np.ndarray],
    result: np.ndarray | None,
    fold: Callable[[np.ndarray, np.ndarray], None],
    head: Head,
) -> Waiting:
    """Each member that wants the result does all of the work."""
    chunk = channel.slot_bytes // stream.dtype.itemsize

    def fill(number: int, slot: np.ndarray) -> None:
        stream.copy_in(arrays, number * chunk, slot)

    def read(number: int, slots: np.ndarray) -> None:
        if result is not None:
            part = result[number * chunk : (number + 1) * chunk]
            fold(slots[:, : len(part)], part)

    count = _count(stream.length, chunk)
    yield from _rounds(channel, stream.dtype, count, range(channel.size), fill, read, head)


def _reduce_shared(
    channel: Channel,
    stream: Stream,
    arrays: Sequence[np.ndarray],
    result: np.ndarray,
    fold: Callable[[np.ndarray, np.ndarray], None],
    block: tuple[int, int, int],
    head: Head,
) -> Waiting:
    """Each member does its part of each chunk of a block of the stream, and then they exchange the parts."""
    first, last, chunk = block
    size, rank = channel.size, channel.rank
    chunks = _count(last - first, chunk)
    largest = chunk // size

    def part(number: int, member: int) -> np.ndarray:
        """A member's part of the result of a chunk."""
        begin = first + number * chunk
        length = min(chunk, last - begin)
        return result[begin + length * member // size : begin + length * (member + 1) // size]

    def fill(number: int, slot: np.ndarray) -> None:
        begin = first + number * chunk
        stream.copy_in(arrays, begin, slot[: min(chunk, last - begin)])

    def read(number: int, slots: np.ndarray) -> None:
        length = min(chunk, last - first - number * chunk)
        fold(slots[:, length * rank // size : length * (rank + 1) // size], part(number, rank))

    yield from _rounds(channel, stream.dtype, chunks, range(size), fill, read, head)

    # A slot holds a member's parts of as many chunks as there are members.
    def fill_parts(number: int, slot: np.ndarray) -> None:
        for place, source in enumerate(range(number * size, min((number + 1) * size, chunks))):
            mine = part(source, rank)
            slot[place * largest : place * largest + len(mine)] = mine

    def read_parts(number: int, slots: np.ndarray) -> None:
        for place, source in enumerate(range(number * size, min((number + 1) * size, chunks))):
            for member in range(size):
                if member != rank:
                    target = part(source, member)
                    target[:] = slots[member, place * largest : place * largest + len(target)]

    yield from _rounds(channel, result.dtype, _count(chunks, size), range(size), fill_parts, read_parts, None)


def _rows(channel: Channel, rows: np.ndarray, read: Callable[[np.ndarray, int], None], head: Head) -> Waiting:
    """Rounds in whose slots each member has a part for each other one, so that all have something to read in each."""
    size, rank = channel.size, channel.rank
    chunk = channel.slot_bytes // rows.dtype.itemsize // size

    def fill(number: int, slot: np.ndarray) -> None:
        parts = rows[:, number * chunk : (number + 1) * chunk]
        slot[: chunk * size].reshape(size, chunk)[:, : parts.shape[1]] = parts

    def read_mine(number: int, slots: np.ndarray) -> None:
        length = min(chunk, rows.shape[1] - number * chunk)
        read(slots[:, rank * chunk : rank * chunk + length], number * chunk)

    yield from _rounds(channel, rows.dtype, _count(rows.shape[1], chunk), range(size), fill, read_mine, head)


def _rounds(
    channel: Channel,
    dtype: np.dtype,
    count: int,
    publishers: Sequence[int],
    fill: Callable[[int, np.ndarray], None],
    read: Callable[[int, np.ndarray], None],
    head: Head,
) -> Waiting:
    """Rounds in which the publishers fill a slot each, ``fill(round, slot)``, and all members read all slots,
    ``read(round, slots of all members)``. With a head nobody publishes a second slot before all heads agree.

    Raises:
        Mismatch: the heads differ.
    """
    rings = channel.rings(dtype)
    fills = channel.rank in publishers
    begin, published = channel.step, 0
    for number in range(count):
        step = begin + number
        meets = head is not None and number == 0
        while published < count and published <= number + (0 if meets else _AHEAD):
            ours = begin + published
            if published > number and not channel.has_room(ours):
                break
            yield from channel.room(ours)
            if meets:
                channel.heads(ours)[channel.rank] = head
            if fills:
                fill(published, rings[channel.rank, ours % channel.slots])
            channel.publish(ours)
            published += 1
        yield from channel.there(step, range(channel.size) if meets else publishers)
        channel.step = step + 1
        if meets:
            heads = channel.heads(step)
            if (heads != heads[0]).any():
                channel.done(step)
                raise Mismatch
        read(number, rings[:, step % channel.slots])
        channel.done(step)


def _folding(reduction: str, size: int) -> Callable[[np.ndarray, np.ndarray], None]:
    """Reduce the rows of an array, in their order, into another one, and divide by their number for a mean."""
    combine = _FOLDS[reduction]

    def fold(rows: np.ndarray, result: np.ndarray) -> None:
        dtype = result.dtype
        if size == 1:
            result[:] = rows[0]
        else:
            combine(rows[0], rows[1], out=result, dtype=dtype, casting="unsafe")
        for row in rows[2:]:
            combine(result, row, out=result, dtype=dtype, casting="unsafe")
        if reduction == "mean":
            if rows.dtype.kind in "iu":
                np.divide(result, size, out=result)
            else:
                np.multiply(result, dtype.type(1.0 / size), out=result)

    return fold


def _count(length: int, chunk: int) -> int:
    return max(1, -(-length // chunk))


def _nothing(*_: Any) -> None:
    pass
