"""The operations as programs: the rounds in which the members of a group exchange their values, whatever carries them.

In a round some members publish values, and others read what they need of them: in memory all read where it lies, and
through sockets and MPI each is sent its part (see ``queue.Channel``). Reductions add in the order of the ranks, element
by element, so that every rank gets the same bits, however the data was split into rounds.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Callable, NamedTuple, Optional

import numpy as np

from npu_device._src.collectives.dtypes import Rows, fold_arrays, is_narrow, wire_scales
from npu_device._src.collectives.engines.host.queue import ALIGNMENT, BufferPool, Channel, Head, Program, compares

# The size in bytes from which three or more ranks share the work of a reduction, instead of each doing all of it in one
# round less. Two ranks gain nothing: adding half and copying the other half is as much work as adding all.
_SHARED_FROM_BYTES = 64 << 10

_PART_BYTES = 512 << 10  # a member's part of a slot, so that it stays in the cache (docs/notes.md)
_MOST_SLOT_BYTES = 8 << 20

Span = tuple[int, int]
"""The first element, and the one after the last."""


class Stream:
    """A list of arrays, flat, as one stream of elements of a dtype. A member that sends nothing has their shapes only.

    Each array begins at a multiple of ``ALIGNMENT`` bytes, in the stream and in the buffer of the results, so that the
    same offsets apply to both.
    """

    def __init__(self, shapes: Sequence[tuple[int, ...]], dtype: np.dtype, arrays: Sequence[np.ndarray] = ()) -> None:
        self.dtype, self.shapes, self.arrays = dtype, shapes, arrays
        self.starts: list[int] = []
        self.lengths = list(map(math.prod, shapes))
        unit = ALIGNMENT // min(dtype.itemsize, ALIGNMENT)
        length = 0
        for elements in self.lengths:
            self.starts.append(length)
            length += -(-elements // unit) * unit
        self.length = length

    def copy_in(self, first: int, slot: np.ndarray) -> None:
        """Fill a slot with the stream from element ``first`` on. Arrays of another dtype are cast; gaps between arrays
        are left as they are.
        """
        arrays, end = self.arrays, first + len(slot)
        if len(arrays) == 1 and arrays[0].dtype == slot.dtype:
            part = arrays[0][first:end]
            slot[: len(part)] = part
            return
        # Start at the array in which the slot begins: with hundreds of arrays, checking each one for each slot is slow.
        for position in range(max(0, bisect_right(self.starts, first) - 1), len(arrays)):
            start = self.starts[position]
            if start >= end:
                break
            low, high = max(start, first), min(start + self.lengths[position], end)
            if low < high:
                part = arrays[position][low - start : high - start]
                if part.dtype == slot.dtype:
                    slot[low - first : high - first] = part
                    continue
                with np.errstate(all="ignore"):  # what overflows 16 bits is infinite; TensorFlow doesn't warn either
                    slot[low - first : high - first] = part

    def part(self, first: int, last: int, buffers: BufferPool) -> np.ndarray:
        """Return a span of the stream: of one of the arrays as it is, or a copy of what is in several."""
        position = bisect_right(self.starts, first) - 1
        start = self.starts[position]
        if last <= start + self.lengths[position] and self.arrays[position].dtype == self.dtype:
            return self.arrays[position][first - start : last - start]
        copy = buffers.array((last - first,), self.dtype)
        self.copy_in(first, copy)
        return copy

    def divided(self, share: int) -> Stream:
        """Return this member's values divided by a number."""
        if share == 1:
            return self
        return Stream(self.shapes, self.dtype, [array / array.dtype.type(share) for array in self.arrays])

    def results(self, pool: BufferPool, dtype: np.dtype) -> tuple[np.ndarray, list[np.ndarray]]:
        """Return memory for the whole stream in some dtype, flat, and the arrays in it, in their shapes."""
        flat, arrays = pool.take(self.length * dtype.itemsize).view(dtype), []
        for start, length, shape in zip(self.starts, self.lengths, self.shapes):
            arrays.append(flat[start : start + length].reshape(shape))
        return flat, arrays


def _nothing(rows: Any) -> None: ...


class Round(NamedTuple):
    """One exchange.

    Attributes:
        dtype: dtype of the values.
        spans: which elements of its source a member publishes: one span that all readers get, or one for each member.
            Except with ``targets``, they are the same on all members.
        publishers: the members that publish.
        stride: how far apart the spans of several members lie in a slot, in elements; 0 for one span.
        source: what this member publishes; None if it doesn't.
        readers: the members that read; None for all.
        targets: by member, where to put its values. If empty, ``read`` gets them.
        read: called with the values of all publishers, by member: in a row for each, what this member reads of them.
        after: how many rounds have to be read before this one is published, because its source comes from them.
    """

    dtype: np.dtype
    spans: Sequence[Span]
    publishers: Sequence[int]
    stride: int = 0
    source: Optional[Stream] = None
    readers: Optional[Sequence[int]] = None
    targets: Mapping[int, np.ndarray] = {}
    read: Callable[[Any], None] = _nothing
    after: int = 0

    def span(self, member: int) -> Span:
        """Return which elements of a publisher's source a member reads."""
        return self.spans[member] if len(self.spans) > 1 else self.spans[0]

    def fill(self, slot: np.ndarray) -> None:
        """Copy what this member publishes into a slot, of the dtype of the round."""
        assert self.source is not None
        begin = 0
        for first, last in self.spans:
            self.source.copy_in(first, slot[begin : begin + last - first])
            begin += self.stride

    def take(self, slots: np.ndarray, rank: int) -> None:
        """Read what this member needs of the slots of all members, shape [size, elements of a slot]."""
        begin = rank * self.stride
        for member, target in self.targets.items():
            target[:] = slots[member, begin : begin + len(target)]
        if self.read is not _nothing:
            first, last = self.span(rank)
            self.read(slots[:, begin : begin + last - first])


def reduce(
    channel: Channel,
    stream: Stream,
    result: np.ndarray | None,
    dtype: np.dtype,
    reduction: str,
    readers: Sequence[int],
    head: Head | None,
) -> Program:
    """Reduce a stream to its readers, all members or one, each of which has a ``result`` as long as the stream."""
    shares, scale = [1] * channel.size, 1
    if is_narrow(stream.dtype) and stream.dtype != dtype:
        shares, scale = wire_scales(reduction, channel.counts)
        stream = stream.divided(shares[channel.rank])
    fold = partial(fold_arrays, reduction=reduction, divisor=sum(channel.counts), shares=shares)
    small = stream.length * stream.dtype.itemsize <= _SHARED_FROM_BYTES or len(readers) == 1
    if channel.size == 2 or (channel.reaches_all and small):
        return channel.run(_each_by_itself(channel, stream, result, readers, fold), head)
    return channel.run(_in_parts(channel, stream, result, dtype, readers, fold, scale), head)


def _each_by_itself(
    channel: Channel, stream: Stream, result: np.ndarray | None, readers: Sequence[int], fold: Callable[..., None]
) -> Iterator[Round]:
    everybody = range(channel.size)
    for first, last in _chunks(stream.length, channel.slot_bytes // stream.dtype.itemsize):
        read = _nothing if result is None else partial(fold, result=result[first:last])
        yield Round(stream.dtype, [(first, last)], everybody, 0, stream, readers, read=read)


def _in_parts(
    channel: Channel,
    stream: Stream,
    result: np.ndarray | None,
    dtype: np.dtype,
    readers: Sequence[int],
    fold: Callable[..., None],
    scale: int,
) -> Iterator[Round]:
    """Reduce with the members sharing the work, one block of the stream after the other: each reduces its part of the
    block, and publishes the result, which others wait for while the next blocks are on their way.
    """
    size, rank, everybody = channel.size, channel.rank, range(channel.size)
    compresses = stream.dtype != dtype and is_narrow(stream.dtype) and not channel.reaches_all
    sent = stream.dtype if compresses else dtype  # of the results
    aligned = ALIGNMENT // stream.dtype.itemsize
    piece = max(1, channel.slot_bytes // stream.dtype.itemsize // size // aligned * aligned)
    # What a member publishes as a result: a whole slot if that costs one copy, else what it gets in one round.
    slot = channel.slot_bytes // sent.itemsize
    part = min(slot, max(piece, slot // piece * piece)) if channel.reaches_all else piece
    ready: deque[Round] = deque()
    number = 0
    for first, last in _chunks(stream.length, part * size):
        bounds = [first + (last - first) * member // size for member in range(size + 1)]
        low, high = bounds[rank], bounds[rank + 1]
        if compresses or result is None:
            whole = channel.buffers.array((last - first,), sent)
        else:
            whole = result[first:last]
        mine = whole[low - first : high - first]
        fold_mine = partial(_fold_compressed, fold=fold, dtype=dtype, scale=scale) if compresses else fold
        for begin, _ in _chunks(max(map(int.__sub__, bounds[1:], bounds)), piece):
            spans = [
                (min(start + begin, end), min(start + begin + piece, end)) for start, end in zip(bounds, bounds[1:])
            ]
            read = partial(fold_mine, result=mine[spans[rank][0] - low : spans[rank][1] - low])
            yield Round(stream.dtype, spans, everybody, piece, stream, read=read)
            number += 1
        targets = {}
        if result is not None:
            others = [(rank + step) % size for step in range(1, size)]
            targets = {member: whole[bounds[member] - first : bounds[member + 1] - first] for member in others}
        widen = partial(_widen, whole, result[first:last], scale) if compresses and result is not None else _nothing
        source = Stream([mine.shape], sent, [mine])
        ready.append(Round(sent, [(0, len(mine))], everybody, 0, source, readers, targets, widen, number))
        if number - ready[0].after >= channel.ahead:
            yield ready.popleft()
            number += 1
    yield from ready


def _fold_compressed(rows: Rows, result: np.ndarray, fold: Any, dtype: np.dtype, scale: int) -> None:
    """Reduce values that came in 16 bits, in the dtype they had, and round the result to 16 bits again."""
    total = np.empty(result.shape, dtype)
    fold(rows, result=total)
    with np.errstate(all="ignore"):
        result[:] = total / total.dtype.type(scale)


def _widen(whole: np.ndarray, result: np.ndarray, scale: int, rows: Any) -> None:
    del rows
    result[:] = whole
    if scale != 1:
        with np.errstate(all="ignore"):
            result *= result.dtype.type(scale)


def broadcast(channel: Channel, stream: Stream, result: np.ndarray | None, root: int, head: Head | None) -> Program:
    """Send the stream of the root into the ``result`` of all other members."""
    source = stream if channel.rank == root else None
    chunk = channel.slot_bytes // stream.dtype.itemsize

    def at_once() -> Iterator[Round]:
        for first, last in _chunks(stream.length, chunk):
            targets = {} if result is None else {root: result[first:last]}
            yield Round(stream.dtype, [(first, last)], [root], 0, source, _others(channel, root), targets)

    def relayed() -> Iterator[Round]:
        """The root sends each other member a part of a chunk, which that one then sends to the rest."""
        relays, ready, number = _others(channel, root), deque[Round](), 0
        for first, last in _chunks(stream.length, chunk):
            spans = [(first, first)] * channel.size
            for position, member in enumerate(relays):
                begin, end = ((last - first) * edge // len(relays) for edge in (position, position + 1))
                spans[member] = first + begin, first + end
            parts = {} if result is None else {member: result[slice(*spans[member])] for member in relays}
            mine = parts.pop(channel.rank, None)
            targets = {} if mine is None else {root: mine}
            yield Round(stream.dtype, spans, [root], chunk, source, relays, targets)
            number += 1
            again = None if mine is None else Stream([mine.shape], stream.dtype, [mine])
            whole = [(0, 0 if mine is None else len(mine))]
            ready.append(Round(stream.dtype, whole, relays, 0, again, relays, parts, after=number))
            if number - ready[0].after >= channel.ahead:
                yield ready.popleft()
                number += 1
        yield from ready

    return channel.run(at_once() if channel.reaches_all or channel.size == 2 else relayed(), head)


def all_gather(channel: Channel, rows: np.ndarray, result: np.ndarray, head: Head | None) -> Program:
    """Gather all members' ``rows``, one of each, shape [n], into ``result``, shape [size, n]."""
    source, everybody = Stream([rows.shape], rows.dtype, [rows]), range(channel.size)
    result[channel.rank] = rows
    spans = _chunks(len(rows), channel.slot_bytes // rows.dtype.itemsize)
    rounds = (
        Round(rows.dtype, [span], everybody, 0, source, targets=_targets(channel, result, *span)) for span in spans
    )
    return channel.run(rounds, head)


def all_to_all(channel: Channel, rows: np.ndarray, result: np.ndarray, head: Head | None) -> Program:
    """Send row i of ``rows`` to member i, and receive row i of ``result`` from member i: both [size, n]."""
    size, length = rows.shape
    source, everybody = Stream([(rows.size,)], rows.dtype, [rows.reshape(-1)]), range(size)
    result[channel.rank] = rows[channel.rank]

    def rounds() -> Iterator[Round]:
        for first, last in _chunks(length, channel.slot_bytes // rows.dtype.itemsize // size):
            spans = [(member * length + first, member * length + last) for member in everybody]
            targets = _targets(channel, result, first, last)
            yield Round(rows.dtype, spans, everybody, last - first, source, targets=targets)

    return channel.run(rounds(), head)


def meet(channel: Channel, head: Head | None) -> Program:
    """Exchange only the heads, if the members haven't agreed on the call."""
    rounds = [Round(np.dtype(np.uint8), [(0, 0)], [])] if head is not None and compares(head) else []
    return channel.run(iter(rounds), head)


def _others(channel: Channel, member: int) -> list[int]:
    return [(member + step) % channel.size for step in range(1, channel.size)]


def _targets(channel: Channel, result: np.ndarray, first: int, last: int) -> dict[int, np.ndarray]:
    return {member: result[member, first:last] for member in _others(channel, channel.rank)}


def _chunks(length: int, most: int) -> Iterator[Span]:
    """Divide elements into spans; at least one, if only for the members to meet."""
    most = max(1, most)
    for first in range(0, max(1, length), most):
        yield first, min(length, first + most)


# The rounds over messages: each member sends every reader what that one reads


class MessageChannel:
    """A channel whose members send messages to each other, for sockets and MPI; see ``queue.Channel``. All start the
    same messages in the same order, so that a message needs no name.
    """

    reaches_all = False
    ahead = 4

    def __init__(self, size: int, rank: int, counts: tuple[int, ...], buffers: BufferPool) -> None:
        self.size, self.rank, self.counts, self.buffers = size, rank, counts, buffers
        self.slot_bytes = min(_MOST_SLOT_BYTES, size * _PART_BYTES)

    def send(self, member: int, data: np.ndarray) -> Any:
        """Start to send bytes to a member: uint8, shape [n]. They must stay as they are until the message has ended.

        As in mpi4py, ``Test()`` advances a message without waiting, and returns whether it has ended.
        """
        raise NotImplementedError

    def receive(self, member: int, data: np.ndarray) -> Any:
        """Start to receive the next message of a member: uint8, shape [n], as many as it has sent."""
        raise NotImplementedError

    def settle(self) -> None:
        """Do nothing: what the members share is no secret to be withdrawn."""

    def run(self, rounds: Iterator[Round], head: Head | None) -> Program:
        """Run rounds, of which several are on their way. The members have agreed on the call: there is no head."""
        del head
        under_way: deque[tuple[list[Any], Round, Any]] = deque()
        number = 0  # of rounds that have been read
        upcoming = next(rounds, None)
        while upcoming is not None or under_way:
            if upcoming is not None and len(under_way) <= self.ahead and upcoming.after <= number:
                under_way.append(self._start(upcoming))
                upcoming = next(rounds, None)
                continue
            messages, one, rows = under_way.popleft()
            for message in messages:
                while not message.Test():
                    yield message
            one.read(rows)
            number += 1

    def _start(self, one: Round) -> tuple[list[Any], Round, Any]:
        """Start a round's messages, but empty ones; return them, the round, and where its values will be."""
        messages, rows = [], dict(one.targets)
        others = [(self.rank + step) % self.size for step in range(1, self.size)]  # not all begin with the same one
        if one.readers is None or self.rank in one.readers:
            first, last = one.span(self.rank)
            for member in others if not one.targets else ():
                if member in one.publishers:
                    rows[member] = self.buffers.array((last - first,), one.dtype)
            messages = [self.receive(member, row.view(np.uint8)) for member, row in rows.items() if row.size]
            if one.source is not None and not one.targets:
                rows[self.rank] = one.source.part(first, last, self.buffers)
        if one.source is not None:
            whole = one.source.part(*one.spans[0], self.buffers) if len(one.spans) == 1 else None
            for member in others if one.readers is None else [each for each in others if each in one.readers]:
                first, last = one.span(member)
                if first < last:
                    data = one.source.part(first, last, self.buffers) if whole is None else whole
                    messages.append(self.send(member, data.view(np.uint8)))
        return messages, one, [rows.get(member) for member in range(self.size)]
