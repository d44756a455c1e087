"""A list of arrays as one stream of elements, which is published slot by slot.

Each array begins at a multiple of ``ALIGNMENT`` bytes, in the stream as in the buffer of the results, so that the same
numbers say where something is in both, and TensorFlow takes each result as it lies.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np

from npu_device.collectives.shared_memory.buffers import ALIGNMENT, BufferPool


class Stream:
    """Where the arrays of some shapes lie.

    Args:
        shapes: their shapes.
        dtype: what the elements are while they travel.
    """

    def __init__(self, shapes: Sequence[tuple[int, ...]], dtype: np.dtype) -> None:
        self.dtype = dtype
        self.shapes = shapes
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

    def copy_in(self, arrays: Sequence[np.ndarray], first: int, slot: np.ndarray) -> None:
        """Fill a slot with the stream from element ``first`` on; arrays of another dtype are cast.

        Args:
            arrays: flat, of the lengths of this stream.
            first: element of the stream.
            slot: of this stream's dtype. Gaps between arrays are left as they are.
        """
        end = first + len(slot)
        # From the array in which the slot begins on: with hundreds of arrays, looking at each for each slot takes long.
        for place in range(max(0, bisect_right(self.starts, first) - 1), len(arrays)):
            start = self.starts[place]
            if start >= end:
                break
            low, high = max(start, first), min(start + self.lengths[place], end)
            if low < high:
                slot[low - first : high - first] = arrays[place][low - start : high - start]

    def results(self, pool: BufferPool, dtype: np.dtype) -> tuple[np.ndarray, list[np.ndarray]]:
        """Memory for the whole stream in some dtype, flat, and the arrays in it, in their shapes."""
        flat = pool.take(self.length * dtype.itemsize).view(dtype)
        arrays = [
            flat[start : start + length].reshape(shape)
            for start, length, shape in zip(self.starts, self.lengths, self.shapes)
        ]
        return flat, arrays
