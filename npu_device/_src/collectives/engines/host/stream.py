"""A list of arrays as one stream of elements, published slot by slot.

Each array begins at a multiple of ``ALIGNMENT`` bytes, in the stream and in the buffer of the results, so that the same
offsets apply to both, and TensorFlow takes each result without a copy.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np

from npu_device._src.collectives.engines.host.buffers import ALIGNMENT, BufferPool


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

    def results(self, pool: BufferPool, dtype: np.dtype) -> tuple[np.ndarray, list[np.ndarray]]:
        """Return memory for the whole stream in some dtype, flat, and the arrays in it, in their shapes."""
        flat = pool.take(self.length * dtype.itemsize).view(dtype)
        arrays = [
            flat[start : start + length].reshape(shape)
            for start, length, shape in zip(self.starts, self.lengths, self.shapes)
        ]
        return flat, arrays
