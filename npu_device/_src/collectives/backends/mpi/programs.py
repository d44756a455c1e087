"""The operations as programs on a channel: which of MPI's operations they start, and what they do with the data.

MPI only moves bytes. Reductions are done here, in the order of the ranks, element by element: every dtype follows the
rules of the other backends, every rank gets the same bits, and they don't depend on how the data was split. A
reduction moves as many bytes as MPI's own: each member gets its part of all members' data, reduces it, and sends the
result to all. Chunks are in flight while others are reduced.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any, Callable, Optional

import numpy as np
import tensorflow as tf

from npu_device._src.collectives import dtypes
from npu_device._src.collectives.backends.arrays.buffers import BufferPool
from npu_device._src.collectives.backends.arrays.engine import Program
from npu_device._src.collectives.backends.arrays.folding import folding, is_narrow
from npu_device._src.collectives.backends.arrays.heads import Head
from npu_device._src.collectives.backends.arrays.stream import Stream
from npu_device._src.collectives.backends.mpi.channel import Channel, done

CHUNK_BYTES = 8 << 20
"""Bytes per chunk and member."""

# Chunks that are started before the first is waited for. At 1 Gbit/s, twice the size and half the number take 10 %
# longer: MPI's own messages wait behind the data. At 10 Gbit/s, half the size takes 60 % longer.
_AHEAD = 4

POOL = BufferPool()


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
    fold = folding(reduction, channel.size)
    yield from _reduce_to_root(channel, stream, result, reduced_dtype, root, fold)


def broadcast(channel: Channel, stream: Stream, result: Optional[np.ndarray], root: int, head: Head) -> Program:
    """Send the root's stream, of bytes, into the ``result`` of all other members."""
    del head

    def start(first: int, last: int) -> tuple[Any, np.ndarray]:
        if result is not None:
            part = result[first:last]
        else:
            part = POOL.take(last - first)
            stream.copy_in(first, part)
        return channel.comm.Ibcast(part, root), part

    yield from _pipeline(stream.length, CHUNK_BYTES, start, _nothing)


def all_gather(channel: Channel, row: np.ndarray, result: np.ndarray, head: Head) -> Program:
    """Gather all members' rows, shape [n], into ``result``, shape [size, n]."""
    del head
    mine, found = _bytes(row), _bytes(result)

    def start(first: int, last: int) -> tuple[Any, np.ndarray]:
        parts = POOL.take(channel.size * (last - first)).reshape(channel.size, -1)
        return channel.comm.Iallgather(mine[first:last], parts), parts

    def finish(first: int, last: int, parts: np.ndarray) -> None:
        found[:, first:last] = parts

    yield from _pipeline(mine.nbytes, CHUNK_BYTES, start, finish)


def all_to_all(channel: Channel, rows: np.ndarray, result: np.ndarray, head: Head) -> Program:
    """Send row i of ``rows`` to member i, and receive row i of ``result`` from member i: both [size, n]."""
    del head
    mine, found = _bytes(rows), _bytes(result)
    length = mine.shape[1]

    def start(first: int, last: int) -> tuple[Any, np.ndarray]:
        sent = np.ascontiguousarray(mine[:, first:last])
        parts = POOL.take(sent.nbytes).reshape(sent.shape)
        return channel.comm.Ialltoall(sent, parts), parts

    def finish(first: int, last: int, parts: np.ndarray) -> None:
        found[:, first:last] = parts

    yield from _pipeline(length, max(1, CHUNK_BYTES // channel.size), start, finish)


_Request = tuple[Any, Callable[[], Any]]
"""A request of MPI, and a function to call when it is done, which may return another one."""


def _pipeline(
    length: int,
    step: int,
    start: Callable[[int, int], tuple[Any, Any]],
    finish: Callable[[int, int, Any], Optional[_Request]],
) -> Program:
    """Start an operation of MPI for each chunk, some ahead of others, and finish them in order.

    Args:
        length: units in all.
        step: units of a chunk.
        start: takes the first unit and the one after the last; returns MPI's request, and what ``finish`` needs.
        finish: called when the request is done, which may start another one.
    """
    started: deque[_Request] = deque()
    later: deque[_Request] = deque()

    def finish_first() -> Program:
        more = yield from _act_on_first(started)
        if more is not None:
            later.append(more)
            if len(later) > _AHEAD:
                yield from _act_on_first(later)

    for first in range(0, length, step):
        last = min(length, first + step)
        request, data = start(first, last)
        started.append((request, partial(finish, first, last, data)))
        if len(started) > _AHEAD:
            yield from finish_first()
    while started:
        yield from finish_first()
    while later:
        yield from _act_on_first(later)


def _act_on_first(requests: deque[_Request]) -> Any:
    request, act = requests.popleft()
    yield from done(request)
    return act()


def _exchange(channel: Channel, stream: Stream, first: int, last: int) -> tuple[Any, list[np.ndarray]]:
    """Start to exchange a chunk: each member gets all members' values of its part, the rows."""
    bounds, item, rank = _bounds(channel, last - first), stream.dtype.itemsize, channel.rank
    sent = POOL.take((last - first) * item).view(stream.dtype)
    stream.copy_in(first, sent)
    mine = sent[bounds[rank] : bounds[rank + 1]]
    found = POOL.take(channel.size * mine.nbytes).view(stream.dtype).reshape(channel.size, -1)
    sizes, starts = _in_bytes(bounds, item)
    incoming = [mine.nbytes] * channel.size
    incoming[rank] = sizes[rank] = 0  # without a copy
    request = channel.comm.Ialltoallv(
        [_bytes(sent), sizes, starts, channel.mpi.BYTE],
        [_bytes(found), incoming, [mine.nbytes * member for member in range(channel.size)], channel.mpi.BYTE],
    )
    return request, [mine if member == rank else found[member] for member in range(channel.size)]


def _reduce(channel: Channel, stream: Stream, result: np.ndarray, fold: Callable[[Any, np.ndarray], None]) -> Program:
    """Reduce a stream: each member reduces its part of each chunk, and gets the others' results."""

    def finish(first: int, last: int, rows: list[np.ndarray]) -> _Request:
        bounds, part = _bounds(channel, last - first), result[first:last]
        fold(rows, part[bounds[channel.rank] : bounds[channel.rank + 1]])
        return _gather(channel, part, bounds), _nothing

    yield from _pipeline(stream.length, _chunk(stream), partial(_exchange, channel, stream), finish)


def _reduce_to_root(
    channel: Channel,
    stream: Stream,
    result: Optional[np.ndarray],
    dtype: np.dtype,
    root: int,
    fold: Callable[[Any, np.ndarray], None],
) -> Program:
    """Reduce a stream: each member reduces its part of each chunk, and the root gets the results."""

    def finish(first: int, last: int, rows: list[np.ndarray]) -> _Request:
        bounds = _bounds(channel, last - first)
        block = POOL.take(rows[0].size * dtype.itemsize).view(dtype)
        fold(rows, block)
        gathered: Any = None
        if result is not None:
            gathered = [_bytes(result[first:last]), *_in_bytes(bounds, dtype.itemsize), channel.mpi.BYTE]
        return channel.comm.Igatherv([_bytes(block), channel.mpi.BYTE], gathered, root), _nothing

    yield from _pipeline(stream.length, _chunk(stream), partial(_exchange, channel, stream), finish)


def _reduce_compressed(channel: Channel, stream: Stream, result: np.ndarray, reduction: str) -> Program:
    """Reduce float32 or float64 values that are sent in 16 bits, in both directions, and added in their own dtype."""
    shares, scale = dtypes.wire_scales(reduction, channel.counts)
    if shares[channel.rank] != 1:
        parts = [array / array.dtype.type(shares[channel.rank]) for array in stream.arrays]
        stream = Stream(stream.shapes, stream.dtype, parts)
    fold = folding(reduction, sum(channel.counts))

    def finish(first: int, last: int, rows: list[np.ndarray]) -> _Request:
        bounds = _bounds(channel, last - first)
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

    yield from _pipeline(stream.length, _chunk(stream), partial(_exchange, channel, stream), finish)


def _gather(channel: Channel, whole: np.ndarray, bounds: Sequence[int]) -> Any:
    """Start to gather the members' blocks of an array, each of which has its own; return MPI's request."""
    sizes, starts = _in_bytes(bounds, whole.dtype.itemsize)
    return channel.comm.Iallgatherv(channel.mpi.IN_PLACE, [_bytes(whole), sizes, starts, channel.mpi.BYTE])


def _chunk(stream: Stream) -> int:
    return CHUNK_BYTES // stream.dtype.itemsize


def _bounds(channel: Channel, length: int) -> list[int]:
    """Return where the members' parts of a chunk begin and end."""
    return [length * member // channel.size for member in range(channel.size + 1)]


def _in_bytes(bounds: Sequence[int], item: int) -> tuple[list[int], list[int]]:
    """Return the sizes and the starts of the members' parts in bytes."""
    sizes = [(end - start) * item for start, end in zip(bounds, bounds[1:])]
    return sizes, [start * item for start in bounds[:-1]]


def _bytes(array: np.ndarray) -> np.ndarray:
    """Return a contiguous array as bytes: uint8, the last dimension longer."""
    return array.view(np.uint8)


def _nothing(*_: Any) -> None:
    pass
