"""A list of arrays as one stream of elements, published slot by slot; memory for results; and the arithmetic on rows,
one for each rank.

Each array begins at a multiple of ``ALIGNMENT`` bytes, in the stream and in the buffer of the results, so that the same
offsets apply to both, and TensorFlow takes each result without a copy. It holds a reference to the array as long as the
tensor lives. Fresh pages cost more than the reduction that writes to them: a buffer is lent by a lease, to which all
arrays in it refer, and is used again when the lease goes.
"""

from __future__ import annotations

import math
import threading
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any, Callable, Union

import numpy as np

ALIGNMENT = 64
"""Bytes. TensorFlow copies arrays that aren't aligned to this."""

_IDLE_ROUNDS = 64

# Smaller buffers come from the allocator's own free lists, which are as fast.
_POOLED_FROM_BYTES = 32 << 10


class _Buffer:
    """Memory that is lent, and comes back.

    Args:
        size: bytes.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._memory = np.empty(size + ALIGNMENT, np.uint8)
        address = self._memory.__array_interface__["data"][0]
        aligned = address + -address % ALIGNMENT
        self.interface = {"version": 3, "typestr": "|u1", "shape": (size,), "data": (aligned, False)}


class _Lease:
    """The owner of the arrays in a buffer: an array that is made of it, and all views of that one, keep it alive."""

    def __init__(self, buffer: _Buffer, returned: deque[_Buffer]) -> None:
        self.__array_interface__ = buffer.interface
        self._buffer, self._returned = buffer, returned

    def __del__(self) -> None:
        # In whichever thread drops the last tensor, also amid ``take``: no lock, and nothing that waits.
        self._returned.append(self._buffer)


class BufferPool:
    """Buffers of one rank. A size that wasn't requested during the last 64 requests is freed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: defaultdict[int, list[_Buffer]] = defaultdict(list)  # by size
        self._returned: deque[_Buffer] = deque()
        self._last_used: dict[int, int] = {}
        self._round = 0

    def take(self, size: int) -> np.ndarray:
        """Return aligned memory: uint8, shape [size]. It is free again when the last array based on it is gone."""
        if size < _POOLED_FROM_BYTES:
            memory = np.empty(size + ALIGNMENT, np.uint8)
            start = -memory.__array_interface__["data"][0] % ALIGNMENT
            return memory[start : start + size]
        with self._lock:
            self._round += 1
            self._last_used[size] = self._round
            while self._returned:
                buffer = self._returned.popleft()
                if buffer.size in self._last_used:
                    self._free[buffer.size].append(buffer)
            if self._free[size]:
                buffer = self._free[size].pop()
            else:
                self._forget_idle()
                buffer = _Buffer(size)
        return np.asarray(_Lease(buffer, self._returned))

    def array(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Return aligned memory as an array."""
        return self.take(math.prod(shape) * dtype.itemsize).view(dtype).reshape(shape)

    def _forget_idle(self) -> None:
        for size in [size for size, used in self._last_used.items() if self._round - used > _IDLE_ROUNDS]:
            del self._last_used[size]
            self._free.pop(size, None)


class Stream:
    """Arrays of given shapes, and their positions in the stream.

    Args:
        shapes: their shapes.
        dtype: dtype of the elements in the stream.
        arrays: what this member sends, flat; none if it sends nothing.
    """

    def __init__(self, shapes: Sequence[tuple[int, ...]], dtype: np.dtype, arrays: Sequence[np.ndarray] = ()) -> None:
        self.dtype = dtype
        self.shapes = shapes
        self.arrays = arrays
        self.starts: list[int] = []
        self.lengths: list[int] = []
        unit = ALIGNMENT // min(dtype.itemsize, ALIGNMENT)
        length = 0
        for shape in shapes:
            elements = 1
            for size in shape:
                elements *= size
            self.starts.append(length)
            self.lengths.append(elements)
            length += -(-elements // unit) * unit
        self.length = length

    def copy_in(self, first: int, slot: np.ndarray) -> None:
        """Fill a slot with the stream from element ``first`` on; arrays of another dtype are cast.

        Args:
            first: element of the stream.
            slot: of this stream's dtype. Gaps between arrays are left as they are.
        """
        arrays, end = self.arrays, first + len(slot)
        if len(arrays) == 1 and arrays[0].dtype == slot.dtype:
            part = arrays[0][first:end]
            slot[: len(part)] = part
            return
        # Start at the array in which the slot begins: with hundreds of arrays, checking each one for each slot is slow.
        for place in range(max(0, bisect_right(self.starts, first) - 1), len(arrays)):
            start = self.starts[place]
            if start >= end:
                break
            low, high = max(start, first), min(start + self.lengths[place], end)
            if low < high:
                part = arrays[place][low - start : high - start]
                if part.dtype == slot.dtype:
                    slot[low - first : high - first] = part
                    continue
                with np.errstate(all="ignore"):  # what overflows 16 bits is infinite; TensorFlow doesn't warn either
                    slot[low - first : high - first] = part

    def part(self, first: int, last: int, buffers: BufferPool) -> np.ndarray:
        """Return a span of the stream: of one of the arrays as it is, or a copy of what is in several."""
        place = bisect_right(self.starts, first) - 1
        start = self.starts[place]
        if last <= start + self.lengths[place] and self.arrays[place].dtype == self.dtype:
            return self.arrays[place][first - start : last - start]
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
        flat = pool.take(self.length * dtype.itemsize).view(dtype)
        arrays = [
            flat[start : start + length].reshape(shape)
            for start, length, shape in zip(self.starts, self.lengths, self.shapes)
        ]
        return flat, arrays


# The arithmetic

Rows = Union[np.ndarray, Sequence[np.ndarray]]

FOLDS: dict[str, Any] = {"sum": np.add, "mean": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum}


def folding(reduction: str, divisor: int, shares: Sequence[int]) -> Callable[[Rows, np.ndarray], None]:
    """Return a function that reduces rows, in order, into another array.

    It works in the result's dtype; 16-bit floats are combined in float32 and rounded once at the end.

    Args:
        reduction: how.
        divisor: what a mean is divided by.
        shares: what each row has been divided by.
    """
    combine = FOLDS[reduction]
    divided = max(shares) > 1

    def fold(rows: Rows, result: np.ndarray) -> None:
        total = np.empty(result.shape, np.float32) if is_narrow(result.dtype) else result
        with np.errstate(all="ignore"):  # infinite gradients are left to the loss scale; TensorFlow doesn't warn either
            if divided:
                rows = [row if share == 1 else row.astype(result.dtype) * share for row, share in zip(rows, shares)]
            if len(rows) == 1:
                total[:] = rows[0]
            else:
                combine(rows[0], rows[1], out=total, dtype=total.dtype, casting="unsafe")
            for row in rows[2:]:
                combine(total, row, out=total, dtype=total.dtype, casting="unsafe")
            if reduction == "mean" and divisor & (divisor - 1) == 0:
                np.multiply(total, total.dtype.type(1.0 / divisor), out=total)  # the bits of a division, but faster
            elif reduction == "mean":
                np.divide(total, divisor, out=total)
            if total is not result:
                result[:] = total

    return fold


def is_narrow(dtype: np.dtype) -> bool:
    """Return whether a dtype is a 16-bit float; numpy sees bfloat16 as bytes."""
    return dtype.itemsize == 2 and dtype.kind not in "iu"
