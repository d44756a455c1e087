"""The operations as programs on a channel that only moves bytes: which messages the members exchange, and what they do
with the data.

Reductions are done here, in the order of the ranks, element by element: every dtype follows the rules of the other
backends, every rank gets the same bits, and they don't depend on how the data was split. A reduction moves as many
bytes as a ring: each member gets its part of all members' data, reduces it, and sends the result to all. Chunks are in
flight while others are reduced.

All members start the same messages in the same order, so that a message needs no name.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Callable, Optional, Protocol

import numpy as np
import tensorflow as tf

from npu_device._src.collectives import dtypes
from npu_device._src.collectives.engines.host.arithmetic import folding, is_narrow
from npu_device._src.collectives.engines.host.queue import Head, Program
from npu_device._src.collectives.engines.host.stream import BufferPool, Stream

POOL = BufferPool()

_PART_BYTES = 512 << 10  # a member's part of a chunk, so that it stays in the cache (docs/notes.md)
_MOST_CHUNK_BYTES = 8 << 20


class Request(Protocol):
    """One message that is sent or received, as mpi4py has it."""

    def Test(self) -> bool:
        """Advance the message without waiting; return whether it has ended."""


class Channel(Protocol):
    """One member's end.

    Attributes:
        size: number of members.
        rank: this member's number.
        counts: for each member, the number of ranks whose sum it contributes.
        ahead: chunks that are started before the first is waited for.
    """

    size: int
    rank: int
    counts: tuple[int, ...]
    ahead: int

    def send(self, member: int, data: np.ndarray) -> Request:
        """Start to send bytes to a member: uint8, shape [n]. They must stay as they are until the message has ended."""

    def receive(self, member: int, data: np.ndarray) -> Request:
        """Start to receive the next message of a member: uint8, shape [n], as many as it has sent."""

    def advance(self, program: Any, block: bool, hurry: bool = False) -> bool:
        """Run a program; see ``queue.Channel``. It yields the request to wait for."""

    def close(self) -> None:
        """Give up the channel."""


def all_reduce(channel: Channel, stream: Stream, result: np.ndarray, reduction: str, head: Head) -> Program:
    """Reduce a stream; ``result`` is as long as the stream, and may be of another dtype. The ranks have agreed on the
    call, so the ``head`` isn't used.
    """
    del head
    if is_narrow(stream.dtype) and stream.dtype != result.dtype:
        yield from _reduce_compressed(channel, stream, result, reduction)
    else:
        yield from _reduce(channel, stream, result, folding(reduction, sum(channel.counts)))


def reduce(
    channel: Channel, stream: Stream, result: Optional[np.ndarray], reduction: str, root: int, head: Head
) -> Program:
    """Reduce a stream to the root, the only one with a ``result``."""
    del head
    reduced_dtype = np.dtype(dtypes.reduced_dtype(tf.as_dtype(stream.dtype), reduction).as_numpy_dtype)
    fold = folding(reduction, sum(channel.counts))
    yield from _reduce_to_root(channel, stream, result, reduced_dtype, root, fold)


def broadcast(channel: Channel, stream: Stream, result: Optional[np.ndarray], root: int, head: Head) -> Program:
    """Send the root's stream, of bytes, into the ``result`` of all other members."""
    del head
    relays = [(root + step) % channel.size for step in range(1, channel.size)]

    def start(first: int, last: int) -> _Started:
        """The root sends each other member a part of the chunk, which that one then sends to the rest."""
        bounds = _bounds(last - first, len(relays))
        if result is None:
            chunk = POOL.take(last - first)
            stream.copy_in(first, chunk)
            sent = [chunk[begin:end] for begin, end in zip(bounds, bounds[1:])]
            return _exchange(channel, dict(zip(relays, sent)), {}), None
        place = relays.index(channel.rank)
        return _exchange(channel, {}, {root: result[first:last][bounds[place] : bounds[place + 1]]}), None

    def finish(first: int, last: int, _: Any) -> _More:
        if result is None or len(relays) == 1:
            return None
        bounds, chunk = _bounds(last - first, len(relays)), result[first:last]
        parts = {member: chunk[bounds[place] : bounds[place + 1]] for place, member in enumerate(relays)}
        mine = parts.pop(channel.rank)
        return _exchange(channel, dict.fromkeys(parts, mine), parts), _nothing

    yield from _pipeline(channel, stream.length, _chunk_bytes(channel), start, finish)


def all_gather(channel: Channel, row: np.ndarray, result: np.ndarray, head: Head) -> Program:
    """Gather all members' rows, shape [n], into ``result``, shape [size, n]."""
    del head
    mine, found = _bytes(row), _bytes(result)
    found[channel.rank] = mine

    def start(first: int, last: int) -> _Started:
        others = _others(channel)
        parts = {member: found[member, first:last] for member in others}
        return _exchange(channel, dict.fromkeys(others, mine[first:last]), parts), None

    yield from _pipeline(channel, mine.nbytes, _chunk_bytes(channel), start, _nothing)


def all_to_all(channel: Channel, rows: np.ndarray, result: np.ndarray, head: Head) -> Program:
    """Send row i of ``rows`` to member i, and receive row i of ``result`` from member i: both [size, n]."""
    del head
    mine, found = _bytes(rows), _bytes(result)
    found[channel.rank] = mine[channel.rank]

    def start(first: int, last: int) -> _Started:
        sent, parts = ({member: each[member, first:last] for member in _others(channel)} for each in (mine, found))
        return _exchange(channel, sent, parts), None

    yield from _pipeline(channel, mine.shape[1], max(1, _chunk_bytes(channel) // channel.size), start, _nothing)


_Started = tuple[list[Request], Any]
"""Messages that have been started, and what to finish them with."""

_More = Optional[tuple[list[Request], Callable[[], Any]]]
"""More messages, and a function to call when they have ended."""


def _pipeline(
    channel: Channel,
    length: int,
    step: int,
    start: Callable[[int, int], _Started],
    finish: Callable[[int, int, Any], _More],
) -> Program:
    """Start the messages of each chunk, some ahead of others, and finish them in order.

    Args:
        channel: the members.
        length: units in all.
        step: units of a chunk.
        start: takes the first unit and the one after the last; returns the messages, and what ``finish`` needs.
        finish: called when the messages have ended; it may start more.
    """
    started: deque[tuple[list[Request], Callable[[], Any]]] = deque()
    later: deque[tuple[list[Request], Callable[[], Any]]] = deque()

    def finish_first() -> Program:
        more = yield from _act_on_first(started)
        if more is not None:
            later.append(more)
            if len(later) > channel.ahead:
                yield from _act_on_first(later)

    for first in range(0, length, step):
        last = min(length, first + step)
        requests, data = start(first, last)
        started.append((requests, partial(finish, first, last, data)))
        if len(started) > channel.ahead:
            yield from finish_first()
    while started:
        yield from finish_first()
    while later:
        yield from _act_on_first(later)


def _act_on_first(started: deque[tuple[list[Request], Callable[[], Any]]]) -> Any:
    requests, act = started.popleft()
    for request in requests:
        while not request.Test():
            yield request
    return act()


def _exchange(channel: Channel, sent: Mapping[int, np.ndarray], found: Mapping[int, np.ndarray]) -> list[Request]:
    """Start to send bytes to some members, and to receive bytes from some; those without bytes take part in neither."""
    requests = [channel.receive(member, part) for member, part in found.items() if part.nbytes]
    return requests + [channel.send(member, part) for member, part in sent.items() if part.nbytes]


def _others(channel: Channel) -> list[int]:
    """Return the other members; each member begins with the next one, so that not all send to the same one."""
    return [(channel.rank + step) % channel.size for step in range(1, channel.size)]


def _scatter(channel: Channel, stream: Stream, first: int, last: int) -> tuple[list[Request], list[np.ndarray]]:
    """Start to exchange a chunk: each member gets all members' values of its part, the rows."""
    bounds, rank = _bounds(last - first, channel.size), channel.rank
    chunk = POOL.take((last - first) * stream.dtype.itemsize).view(stream.dtype)
    stream.copy_in(first, chunk)
    mine = chunk[bounds[rank] : bounds[rank + 1]]
    found = POOL.take(channel.size * mine.nbytes).view(stream.dtype).reshape(channel.size, -1)
    sent = {member: _bytes(chunk[bounds[member] : bounds[member + 1]]) for member in _others(channel)}
    requests = _exchange(channel, sent, {member: _bytes(found[member]) for member in _others(channel)})
    return requests, [mine if member == rank else found[member] for member in range(channel.size)]


def _reduce(channel: Channel, stream: Stream, result: np.ndarray, fold: Callable[[Any, np.ndarray], None]) -> Program:
    """Reduce a stream: each member reduces its part of each chunk, and gets the others' results."""

    def finish(first: int, last: int, rows: list[np.ndarray]) -> _More:
        bounds, part = _bounds(last - first, channel.size), result[first:last]
        fold(rows, part[bounds[channel.rank] : bounds[channel.rank + 1]])
        return _gather(channel, part, bounds), _nothing

    yield from _pipeline(channel, stream.length, _chunk(channel, stream), partial(_scatter, channel, stream), finish)


def _reduce_to_root(
    channel: Channel,
    stream: Stream,
    result: Optional[np.ndarray],
    dtype: np.dtype,
    root: int,
    fold: Callable[[Any, np.ndarray], None],
) -> Program:
    """Reduce a stream: each member reduces its part of each chunk, and the root gets the results."""

    def finish(first: int, last: int, rows: list[np.ndarray]) -> _More:
        if result is None:
            block = POOL.take(rows[0].size * dtype.itemsize).view(dtype)
            fold(rows, block)
            return _exchange(channel, {root: _bytes(block)}, {}), _nothing
        bounds, whole = _bounds(last - first, channel.size), result[first:last]
        parts = [whole[begin:end] for begin, end in zip(bounds, bounds[1:])]
        fold(rows, parts[root])
        return _exchange(channel, {}, {member: _bytes(parts[member]) for member in _others(channel)}), _nothing

    yield from _pipeline(channel, stream.length, _chunk(channel, stream), partial(_scatter, channel, stream), finish)


def _reduce_compressed(channel: Channel, stream: Stream, result: np.ndarray, reduction: str) -> Program:
    """Reduce float32 or float64 values that are sent in 16 bits, in both directions, and added in their own dtype."""
    shares, scale = dtypes.wire_scales(reduction, channel.counts)
    if shares[channel.rank] != 1:
        parts = [array / array.dtype.type(shares[channel.rank]) for array in stream.arrays]
        stream = Stream(stream.shapes, stream.dtype, parts)
    fold = folding(reduction, sum(channel.counts))

    def finish(first: int, last: int, rows: list[np.ndarray]) -> _More:
        bounds = _bounds(last - first, channel.size)
        whole = POOL.take((last - first) * stream.dtype.itemsize).view(stream.dtype)
        total = np.empty(rows[0].shape, result.dtype)
        wide = [row if share == 1 else row.astype(result.dtype) * share for row, share in zip(rows, shares)]
        fold(wide, total)
        with np.errstate(all="ignore"):
            whole[bounds[channel.rank] : bounds[channel.rank + 1]] = total / total.dtype.type(scale)

        def widen() -> None:
            result[first:last] = whole
            if scale != 1:
                result[first:last] *= result.dtype.type(scale)

        return _gather(channel, whole, bounds), widen

    yield from _pipeline(channel, stream.length, _chunk(channel, stream), partial(_scatter, channel, stream), finish)


def _gather(channel: Channel, whole: np.ndarray, bounds: Sequence[int]) -> list[Request]:
    """Start to gather the members' parts of an array, each of which has its own."""
    parts = [_bytes(whole[begin:end]) for begin, end in zip(bounds, bounds[1:])]
    others = _others(channel)
    return _exchange(channel, dict.fromkeys(others, parts[channel.rank]), {member: parts[member] for member in others})


def _chunk_bytes(channel: Channel) -> int:
    return min(_MOST_CHUNK_BYTES, channel.size * _PART_BYTES)


def _chunk(channel: Channel, stream: Stream) -> int:
    return _chunk_bytes(channel) // stream.dtype.itemsize


def _bounds(length: int, parts: int) -> list[int]:
    """Return where the parts of a chunk begin and end."""
    return [length * part // parts for part in range(parts + 1)]


def _bytes(array: np.ndarray) -> np.ndarray:
    """Return a contiguous array as bytes: uint8, the last dimension longer."""
    return array.view(np.uint8)


def _nothing(*_: Any) -> None:
    pass
