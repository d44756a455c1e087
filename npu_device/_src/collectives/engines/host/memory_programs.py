"""The operations as programs on a channel: their rounds, and which members publish and read in each.

A program is a generator that yields only where it would have to wait (see ``Channel.advance``). Reductions add in
the order of the ranks, element by element, so that every rank gets the same bits, however the data was split into
messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Callable

import numpy as np

from npu_device._src.collectives.engines.host.arithmetic import Rows, folding
from npu_device._src.collectives.engines.host.memory_ring import MemoryRing
from npu_device._src.collectives.engines.host.queue import Head, Mismatch, Program, require_same
from npu_device._src.collectives.engines.host.stream import Stream

# How many slots a member publishes before it reads. More slots let the ranks drift further apart; but what it published
# itself should still be in its core's cache when it reads it.
_AHEAD = 3

# The size in bytes from which three or more ranks share the work of a reduction, instead of each doing all of it in one
# round trip less. Two ranks gain nothing: adding half and copying the other half is as much work as adding all.
_SHARED_FROM_BYTES = 64 << 10

# How many slots of a shared reduction are added up before the results are exchanged; they stay in the cache.
_SHARED_SLOTS = 8


def all_reduce(channel: MemoryRing, stream: Stream, result: np.ndarray, reduction: str, head: Head | None) -> Program:
    """Reduce a stream; ``result`` is as long as the stream, and may be of another dtype."""
    fold = folding(reduction, channel.size)
    if channel.size == 2 or stream.length * stream.dtype.itemsize <= _SHARED_FROM_BYTES:
        return _reduce_all(channel, stream, result, fold, head)
    return _reduce_in_blocks(channel, stream, result, fold, head)


def reduce(
    channel: MemoryRing, stream: Stream, result: np.ndarray | None, reduction: str, root: int, head: Head | None
) -> Program:
    """Reduce a stream to the root, the only one with a ``result``."""
    del root
    return _reduce_all(channel, stream, result, folding(reduction, channel.size), head)


def broadcast(channel: MemoryRing, stream: Stream, result: np.ndarray | None, root: int, head: Head | None) -> Program:
    """Send the root's stream into the ``result`` of all other members."""
    chunk = channel.slot_bytes // stream.dtype.itemsize

    def read(number: int, slots: np.ndarray) -> None:
        if result is not None:
            part = result[number * chunk : (number + 1) * chunk]
            part[:] = slots[root, : len(part)]

    return _rounds(channel, stream.dtype, _count(stream.length, chunk), [root], _filling(stream, chunk), read, head)


def all_gather(channel: MemoryRing, row: np.ndarray, result: np.ndarray, head: Head | None) -> Program:
    """Gather all members' rows, shape [n], into ``result``, shape [size, n]."""
    chunk = channel.slot_bytes // row.dtype.itemsize

    def fill(number: int, slot: np.ndarray) -> None:
        part = row[number * chunk : (number + 1) * chunk]
        slot[: len(part)] = part

    def read(number: int, slots: np.ndarray) -> None:
        part = result[:, number * chunk : (number + 1) * chunk]
        part[:] = slots[:, : part.shape[1]]

    return _rounds(channel, row.dtype, _count(len(row), chunk), range(channel.size), fill, read, head)


def all_to_all(channel: MemoryRing, rows: np.ndarray, result: np.ndarray, head: Head | None) -> Program:
    """Send row i of ``rows`` to member i, and receive row i of ``result`` from member i: both [size, n]."""

    size, rank = channel.size, channel.rank
    # Each slot holds a part for each member, so that all have something to read in each round.
    chunk = channel.slot_bytes // rows.dtype.itemsize // size

    def fill(number: int, slot: np.ndarray) -> None:
        parts = rows[:, number * chunk : (number + 1) * chunk]
        slot[: chunk * size].reshape(size, chunk)[:, : parts.shape[1]] = parts

    def read(number: int, slots: np.ndarray) -> None:
        part = result[:, number * chunk : (number + 1) * chunk]
        part[:] = slots[:, rank * chunk : rank * chunk + part.shape[1]]

    return _rounds(channel, rows.dtype, _count(rows.shape[1], chunk), range(size), fill, read, head)


def meet(channel: MemoryRing, head: Head | None) -> Program:
    """Exchange only the heads."""
    return _rounds(channel, np.dtype(np.uint8), 1, [], _nothing, _nothing, head)


def _reduce_all(
    channel: MemoryRing,
    stream: Stream,
    result: np.ndarray | None,
    fold: Callable[[Rows, np.ndarray], None],
    head: Head | None,
) -> Program:
    """Reduce with each member that wants the result doing all of the work."""
    chunk = channel.slot_bytes // stream.dtype.itemsize

    def read(number: int, slots: np.ndarray) -> None:
        if result is not None:
            part = result[number * chunk : (number + 1) * chunk]
            fold(slots[:, : len(part)], part)

    count = _count(stream.length, chunk)
    return _rounds(channel, stream.dtype, count, range(channel.size), _filling(stream, chunk), read, head)


def _reduce_in_blocks(
    channel: MemoryRing,
    stream: Stream,
    result: np.ndarray,
    fold: Callable[[Rows, np.ndarray], None],
    head: Head | None,
) -> Program:
    """Reduce with the members sharing the work, one block of the stream after the other."""
    # A chunk fills a slot, and a member's part of its result, which may have a wider dtype, fits into one.
    part = channel.slot_bytes // result.dtype.itemsize
    chunk = min(channel.slot_bytes // stream.dtype.itemsize, channel.size * part) // channel.size * channel.size
    for first in range(0, stream.length, chunk * _SHARED_SLOTS):
        last = min(stream.length, first + chunk * _SHARED_SLOTS)
        yield from _reduce_shared(channel, stream, result, fold, (first, last, chunk), head)
        head = None


def _reduce_shared(
    channel: MemoryRing,
    stream: Stream,
    result: np.ndarray,
    fold: Callable[[Rows, np.ndarray], None],
    block: tuple[int, int, int],
    head: Head | None,
) -> Program:
    """Reduce with each member doing its part of each chunk of a block of the stream, then exchange the parts."""
    first, last, chunk = block
    size, rank = channel.size, channel.rank
    chunks = _count(last - first, chunk)
    largest = chunk // size
    places = channel.slot_bytes // result.dtype.itemsize // largest

    def part(number: int, member: int) -> np.ndarray:
        """Return a member's part of the result of a chunk."""
        begin = first + number * chunk
        length = min(chunk, last - begin)
        return result[begin + length * member // size : begin + length * (member + 1) // size]

    def fill(number: int, slot: np.ndarray) -> None:
        begin = first + number * chunk
        stream.copy_in(begin, slot[: min(chunk, last - begin)])

    def read(number: int, slots: np.ndarray) -> None:
        length = min(chunk, last - first - number * chunk)
        fold(slots[:, length * rank // size : length * (rank + 1) // size], part(number, rank))

    yield from _rounds(channel, stream.dtype, chunks, range(size), fill, read, head)

    # Now the members publish values of the result's dtype: a slot holds a member's parts of as many chunks as fit.
    def fill_parts(number: int, slot: np.ndarray) -> None:
        for place, source in enumerate(range(number * places, min((number + 1) * places, chunks))):
            mine = part(source, rank)
            slot[place * largest : place * largest + len(mine)] = mine

    def read_parts(number: int, slots: np.ndarray) -> None:
        for place, source in enumerate(range(number * places, min((number + 1) * places, chunks))):
            for member in range(size):
                if member != rank:
                    target = part(source, member)
                    target[:] = slots[member, place * largest : place * largest + len(target)]

    yield from _rounds(channel, result.dtype, _count(chunks, places), range(size), fill_parts, read_parts, None)


def _rounds(
    channel: MemoryRing,
    dtype: np.dtype,
    count: int,
    publishers: Sequence[int],
    fill: Callable[[int, np.ndarray], None],
    read: Callable[[int, np.ndarray], None],
    head: Head | None,
) -> Program:
    """Run rounds in which each publisher fills a slot, ``fill(round, slot)``, and all members read all slots,
    ``read(round, slots of all members)``. With a head, no member publishes a second slot before all heads agree.

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
            if published > number and not channel.has_free_slot(ours):
                break
            yield from channel.free_slot(ours)
            if meets:
                channel.heads(ours)[channel.rank] = head
            if fills:
                fill(published, rings[channel.rank, ours % channel.slots])
            channel.publish(ours)
            published += 1
        yield from channel.published(step, range(channel.size) if meets else publishers)
        channel.step = step + 1
        if meets:
            try:
                require_same(channel.heads(step).tolist())  # a few numbers: faster than with numpy
            except Mismatch:
                channel.done(step)
                raise
        read(number, rings[:, step % channel.slots])
        channel.done(step)


def _filling(stream: Stream, chunk: int) -> Callable[[int, np.ndarray], None]:
    """Return a function that fills a round's slot with its chunk of a stream."""
    return lambda number, slot: stream.copy_in(number * chunk, slot)


def _count(length: int, chunk: int) -> int:
    return max(1, -(-length // chunk))


def _nothing(*_: Any) -> None:
    pass
