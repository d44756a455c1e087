"""Memory for results and what travels, used again: fresh pages cost more than the reduction that writes to them.

A buffer is lent by a lease, to which all arrays in it refer, and is used again when the lease goes. TensorFlow takes a
result without a copy, and holds a reference to the array as long as the tensor lives.
"""

from __future__ import annotations

import math
import threading
from collections import defaultdict, deque

import numpy as np

ALIGNMENT = 64  # bytes; TensorFlow copies arrays that aren't aligned to this
_IDLE_ROUNDS = 64
# Smaller buffers come from the allocator's own free lists, which are as fast.
_POOLED_FROM_BYTES = 32 << 10


class _Lease:
    """What an array in a buffer, and all views of it, keep alive."""

    def __init__(self, buffer: np.ndarray, returned: deque[np.ndarray]) -> None:
        # numpy reads this attribute, and makes the lease the base of the array and of all its
        # views.
        self.__array_interface__ = buffer.__array_interface__
        self._buffer = buffer
        self._returned = returned

    def __del__(self) -> None:
        # This runs in whichever thread drops the last tensor, also amid ``allocate``: no lock, and nothing that waits.
        self._returned.append(self._buffer)


def _aligned(size: int) -> np.ndarray:
    # The allocator aligns to 16 bytes; the extra ones leave room to move up to the next
    # multiple.
    memory = np.empty(size + ALIGNMENT, np.uint8)
    start = -memory.__array_interface__["data"][0] % ALIGNMENT
    return memory[start : start + size]


class BufferPool:
    """Buffers of one rank. A size that wasn't requested during the last 64 requests is freed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free = defaultdict[int, list[np.ndarray]](list)  # free buffers by size
        self._returned = deque[np.ndarray]()
        self._recent = deque[int](maxlen=_IDLE_ROUNDS)  # the sizes of the last requests

    def allocate(self, size: int) -> np.ndarray:
        """Return aligned memory: uint8, shape [size]. It is free again when the last array based on it is gone."""
        if size < _POOLED_FROM_BYTES:
            return _aligned(size)
        with self._lock:
            self._recent.append(size)
            while self._returned:
                buffer = self._returned.popleft()
                # A size that was given up meanwhile isn't kept: its buffer goes back to the
                # allocator here.
                if buffer.size in self._free:
                    self._free[buffer.size].append(buffer)
            if not self._free[size]:
                # Idle buffers go only when memory is about to grow, so that a steady training loop never pays for the
                # search.
                for idle_size in self._free.keys() - set(self._recent):
                    del self._free[idle_size]
                self._free[size].append(_aligned(size))
            buffer = self._free[size].pop()
        return np.asarray(_Lease(buffer, self._returned))

    def array(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Return aligned memory as an array."""
        return self.allocate(math.prod(shape) * dtype.itemsize).view(dtype).reshape(shape)
