"""The rounds of each kind of transfer, in which the members of a group exchange their values, whatever carries them.

Reductions add in the order of the ranks, element by element, so that every rank gets the same bits, however the data
was split into rounds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Callable

import numpy as np

from npu_device._src.collectives.dtypes import (
    Rows,
    convert,
    fold_arrays,
    is_narrow,
    total_dtype_of,
    wire_scales,
)
from npu_device._src.collectives.engines.host.buffers import ALIGNMENT
from npu_device._src.collectives.engines.host.channel import (
    Channel,
    Round,
    Rounds,
    Span,
    Stream,
    ignore,
)

# The size in bytes from which three or more ranks share the work of a reduction, instead of each doing all of it in one
# round less. Two ranks gain nothing: adding half and copying the other half is as much work as adding all.
_SCATTER_FROM_BYTES = 64 << 10

Fold = Callable[..., None]
"""Reduces rows, one of each member, into ``output``."""


def reduce(
    channel: Channel,
    stream: Stream,
    result: np.ndarray,
    reduction: str,
    readers: Sequence[int],
) -> Rounds:
    """Reduce a stream to its readers, all members or one, each of which has a ``result`` as long as the stream."""
    stream, fold, scale = _prepared(channel, stream, result.dtype, reduction)
    is_long = stream.length * stream.dtype.itemsize > _SCATTER_FROM_BYTES
    has_work_to_share = is_long and len(readers) > 1
    if channel.size == 2 or (channel.reaches_all and not has_work_to_share):
        return _reduce_at_each_reader(channel, stream, result, readers, fold)
    return _ScatterGatherReduction(channel, stream, result, readers, fold, scale).rounds()


def reduce_to_owners(
    channel: Channel,
    stream: Stream,
    result: np.ndarray,
    reduction: str,
    firsts: Sequence[int],
) -> Rounds:
    """Reduce a stream, of which each member gets a piece into its ``result``: from the first array that it owns to the
    first one of the next member. The pieces have the bits that ``reduce`` gives in memory.
    """
    stream, fold, _ = _prepared(channel, stream, result.dtype, reduction)
    edges = [*stream.starts, stream.length]
    bounds = [edges[position] for position in firsts]
    rank = channel.rank

    def fold_own(span: Span, output: np.ndarray, rows: Rows) -> None:
        values = list(rows)
        values[rank] = stream.slice(*span, channel.buffers)
        fold(values, output=output)

    for spans in _spans_of_pieces(channel, stream, bounds):
        start, end = spans[rank]
        output = result[start - bounds[rank] : end - bounds[rank]]
        read = partial(fold_own, (start, end), output)
        yield Round(stream.dtype, spans, range(channel.size), stream, read=read, kept=rank)


def _spans_of_pieces(
    channel: Channel, stream: Stream, bounds: Sequence[int]
) -> Iterator[list[Span]]:
    """Yield for each round the span of each member. All have their last round at the same time, however long their
    pieces are, so that no member waits for another one's work.
    """
    unit = ALIGNMENT // stream.dtype.itemsize
    # Each span may be up to a unit longer than its part of the slot, since it begins at one.
    capacity = max(1, channel.slot_bytes // stream.dtype.itemsize - channel.size * unit)
    # A member publishes all pieces but its own.
    shortest = min(high - low for low, high in zip(bounds, bounds[1:]))
    count = max(1, -(-(stream.length - shortest) // capacity))
    edges = list(bounds[:-1])
    for round_number in range(1, count + 1):
        spans = []
        for member, (low, high) in enumerate(zip(bounds, bounds[1:])):
            edge = low + (high - low) * round_number // count // unit * unit
            end = edge
            if round_number == count:
                end = high
            spans.append((edges[member], end))
            edges[member] = end
        yield spans


def _prepared(
    channel: Channel, stream: Stream, dtype: np.dtype, reduction: str
) -> tuple[Stream, Fold, int]:
    """Return the values that this member sends, what reduces those of all members, and by what sums are divided if
    they travel in the dtype of the values.
    """
    # A sum of 16 bits must not become infinite: each member sends its share of the values.
    shares = [1] * channel.size
    scale = 1
    if is_narrow(stream.dtype) and stream.dtype != dtype:
        shares, scale = wire_scales(reduction, channel.counts)
        stream = stream.divided(shares[channel.rank])
    fold = partial(
        fold_arrays,
        reduction=reduction,
        divisor=sum(channel.counts),
        shares=shares,
        total_dtype=total_dtype_of(dtype),
    )
    return stream, fold, scale


def _reduce_at_each_reader(
    channel: Channel, stream: Stream, result: np.ndarray, readers: Sequence[int], fold: Fold
) -> Rounds:
    """Let each reader reduce everything: no member does work for another."""
    members = range(channel.size)
    for start, end in _chunks(stream.length, channel.slot_bytes // stream.dtype.itemsize):
        read = ignore
        if channel.rank in readers:
            read = partial(fold, output=result[start:end])
        yield Round(stream.dtype, [(start, end)], members, stream, readers, read=read)


# A reduction whose work the members share: its blocks, and rounds that overlap


class _ScatterGatherReduction:
    """A reduction whose work the members share, one block of the stream after the other.

    Each member reduces a piece of the block, its own (scatter), and publishes the result (gather), for which the others
    wait while the next blocks are on their way.
    """

    def __init__(
        self,
        channel: Channel,
        stream: Stream,
        result: np.ndarray,
        readers: Sequence[int],
        fold: Fold,
        scale: int,
    ) -> None:
        self._channel = channel
        self._stream = stream
        self._result = result
        self._readers = readers
        self._fold = fold
        self._scale = scale
        # In memory, results that are read where they lie cost no less in 16 bits.
        self._rounds_results = (
            stream.dtype != result.dtype and is_narrow(stream.dtype) and not channel.reaches_all
        )
        # The results travel in their dtype, or are rounded to that of the values.
        self._dtype = result.dtype
        if self._rounds_results:
            self._dtype = stream.dtype
        size = channel.size
        aligned = ALIGNMENT // stream.dtype.itemsize
        # The elements of a member's piece that travel in one round.
        elements = channel.slot_bytes // stream.dtype.itemsize
        self._chunk = max(1, elements // size // aligned * aligned)
        # A member's piece of a block: where one copy reaches all members, as many chunks as fit into a slot; else one.
        self._piece = self._chunk
        if channel.reaches_all:
            slot = channel.slot_bytes // self._dtype.itemsize
            self._piece = min(slot, max(self._chunk, slot // self._chunk * self._chunk))

    def rounds(self) -> Rounds:
        """Return the rounds of all blocks."""
        blocks = _chunks(self._stream.length, self._piece * self._channel.size)
        return _pipelined((self._block(*block) for block in blocks), self._channel.ahead)

    def _block(self, start: int, end: int) -> tuple[Iterable[Round], Round]:
        """Return the rounds that scatter a block, and the one that gathers its results."""
        size = self._channel.size
        # The bounds come from a multiplication first, so that the pieces differ by at most one element.
        bounds = [start + (end - start) * member // size for member in range(size + 1)]
        block = self._result[start:end]
        # This member has no result, or gets it rounded first.
        if self._channel.rank not in self._readers or self._rounds_results:
            block = self._channel.buffers.array((end - start,), self._dtype)
        pieces = [block[low - start : high - start] for low, high in zip(bounds, bounds[1:])]
        return self._scatter(bounds, pieces[self._channel.rank]), self._gather(start, block, pieces)

    def _scatter(self, bounds: Sequence[int], piece: np.ndarray) -> Rounds:
        """Yield the rounds in which each member reads all members' values of its piece, and reduces them."""
        rank = self._channel.rank
        members = range(self._channel.size)
        # All members need the same number of rounds, including those with a shorter piece.
        longest = max(high - low for low, high in zip(bounds, bounds[1:]))
        for offset, _ in _chunks(longest, self._chunk):
            spans = []
            for low, high in zip(bounds, bounds[1:]):
                spans.append((min(low + offset, high), min(low + offset + self._chunk, high)))
            start, end = spans[rank]
            output = piece[start - bounds[rank] : end - bounds[rank]]
            read = partial(self._reduce, output=output)
            yield Round(self._stream.dtype, spans, members, self._stream, read=read)

    def _gather(self, start: int, block: np.ndarray, pieces: Sequence[np.ndarray]) -> Round:
        """Return the round in which the members publish their pieces, reduced."""
        rank = self._channel.rank
        piece = pieces[rank]
        targets = {}
        read: Callable[..., None] = ignore
        if rank in self._readers:
            # A member's own piece is in place already.
            targets = {member: pieces[member] for member in self._channel.other_members(rank)}
            if self._rounds_results:
                read = partial(self._decode, block, self._result[start : start + len(block)])
        source = Stream([piece.shape], self._dtype, [piece])
        members = range(self._channel.size)
        return Round(self._dtype, [(0, len(piece))], members, source, self._readers, targets, read)

    def _reduce(self, rows: Rows, output: np.ndarray) -> None:
        """Reduce rows into a piece of the results that travels."""
        if not self._rounds_results:
            self._fold(rows, output=output)
            return
        total = np.empty(output.shape, self._result.dtype)
        self._fold(rows, output=total)
        with np.errstate(all="ignore"):
            # Sums are divided, so that they fit into 16 bits.
            convert(total / total.dtype.type(self._scale), output)

    def _decode(self, block: np.ndarray, result: np.ndarray, rows: Rows) -> None:
        """Turn a block of rounded results into results. It lies in the targets of its round, so no rows are needed."""
        del rows
        convert(block, result)
        if self._scale != 1:
            with np.errstate(all="ignore"):
                result *= result.dtype.type(self._scale)


def _pipelined(blocks: Iterable[tuple[Iterable[Round], Round]], ahead: int) -> Rounds:
    """Yield the rounds of blocks. Each block begins with some rounds, and ends with one whose source comes from those:
    it follows ``ahead`` rounds later, so that nobody waits for it.
    """
    endings = deque[Round]()
    count = 0  # number of rounds so far
    for beginning, ending in blocks:
        for exchange in beginning:
            yield exchange
            count += 1
        endings.append(ending._replace(after=count))
        if count - endings[0].after >= ahead:
            yield endings.popleft()
            count += 1
    yield from endings


# Moves


def broadcast(channel: Channel, stream: Stream, results: Sequence[np.ndarray]) -> Rounds:
    """Send the stream of each member to all others: into its row of ``results``, which is as long as that stream. This
    member has its stream already, and its row isn't used.
    """
    lengths = list(map(len, results))
    lengths[channel.rank] = stream.length
    senders = [member for member, length in enumerate(lengths) if length]
    if len(senders) == 1 and channel.size > 2 and not channel.reaches_all:
        return _spread_by_relays(channel, stream, results[senders[0]], senders[0])
    return _spread(channel, stream, results, lengths)


def _spread_by_relays(channel: Channel, stream: Stream, result: np.ndarray, root: int) -> Rounds:
    """Send each other member a piece of a chunk, which it then sends to the rest."""
    source = None
    length = len(result)
    if channel.rank == root:
        source = stream
        length = stream.length
    # Each relay passes on an equal piece, so that the root sends everything only once.
    dtype = stream.dtype
    chunk = channel.slot_bytes // dtype.itemsize
    relays = channel.other_members(root)

    def block(start: int, end: int) -> tuple[list[Round], Round]:
        spans = [(start, start)] * channel.size
        for position, member in enumerate(relays):
            piece_start = start + (end - start) * position // len(relays)
            piece_end = start + (end - start) * (position + 1) // len(relays)
            spans[member] = (piece_start, piece_end)
        # Relays get what the others pass on, too; the root has everything.
        if source is not None:
            sending = Round(dtype, spans, [root], source, relays)
            return [sending], Round(dtype, [(0, 0)], relays, None, relays)
        pieces = {member: result[slice(*spans[member])] for member in relays}
        piece = pieces.pop(channel.rank)
        sending = Round(dtype, spans, [root], source, relays, {root: piece})
        relayed = Stream([piece.shape], dtype, [piece])
        return [sending], Round(dtype, [(0, len(piece))], relays, relayed, relays, pieces)

    return _pipelined((block(*span) for span in _chunks(length, chunk)), channel.ahead)


def all_gather(channel: Channel, rows: np.ndarray, result: np.ndarray) -> Rounds:
    """Gather all members' ``rows``, one of each, shape [n], into ``result``, shape [size, n]."""
    result[channel.rank] = rows
    stream = Stream([rows.shape], rows.dtype, [rows])
    return _spread(channel, stream, list(result), [len(rows)] * channel.size)


def _spread(
    channel: Channel, stream: Stream, results: Sequence[np.ndarray], lengths: Sequence[int]
) -> Rounds:
    """Send the stream of each member to all others, given how many elements each one sends."""
    rank = channel.rank
    for start, end in _chunks(max(lengths), channel.slot_bytes // stream.dtype.itemsize):
        publishers = [member for member, length in enumerate(lengths) if length > start]
        targets = {member: results[member][start:end] for member in publishers if member != rank}
        source = None
        span = (start, end)
        if rank in publishers:
            source = stream
            span = (start, min(end, lengths[rank]))
        yield Round(stream.dtype, [span], publishers, source, targets=targets)


def all_to_all(channel: Channel, rows: np.ndarray, result: np.ndarray) -> Rounds:
    """Send row i of ``rows`` to member i, and receive row i of ``result`` from member i: both [size, n]."""
    size, length = rows.shape
    source = Stream([(rows.size,)], rows.dtype, [rows.reshape(-1)])
    members = range(size)
    rank = channel.rank
    result[rank] = rows[rank]
    for start, end in _chunks(length, channel.slot_bytes // rows.dtype.itemsize // size):
        spans = [(member * length + start, member * length + end) for member in members]
        senders = channel.other_members(rank)
        targets = {member: result[member, start:end] for member in senders}
        yield Round(rows.dtype, spans, members, source, targets=targets)


def meet(channel: Channel, is_agreed: bool) -> Rounds:
    """Exchange only the heads, if the members haven't agreed on the call."""
    if not is_agreed:
        yield Round(np.dtype(np.uint8), [(0, 0)], [])


def _chunks(length: int, limit: int) -> Iterator[Span]:
    """Divide elements into spans; at least one, if only for the members to meet."""
    limit = max(1, limit)
    for start in range(0, max(1, length), limit):
        yield start, min(length, start + limit)
