"""Memory for results, reused as soon as no result in it is referenced any more.

Fresh pages cost more than the reduction that writes to them. TensorFlow takes over an aligned array as a
tensor without copying it, and holds a reference to it as long as the tensor lives; a buffer to which only this
pool refers is free.
"""

from __future__ import annotations

import sys
import threading

import numpy as np

ALIGNMENT = 64
"""Bytes. TensorFlow copies arrays that aren't aligned to this."""

# The references to a buffer that only the pool uses: the list, the name in the loop, and getrefcount's own argument.
_REFERENCES_OF_A_FREE_ONE = 3
_IDLE_ROUNDS = 64

# Smaller buffers come from the allocator's own free lists, which are as fast.
_POOLED_FROM_BYTES = 32 << 10


class BufferPool:
    """Buffers of one process. A size that wasn't requested during the last 64 requests is freed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._buffers: list[np.ndarray] = []
        self._last_used: dict[int, int] = {}
        self._round = 0

    def take(self, size: int) -> np.ndarray:
        """Return aligned memory: uint8, shape [size]. It is free again when the last array based on it is gone."""
        if size < _POOLED_FROM_BYTES:
            return _aligned(np.empty(size + ALIGNMENT, np.uint8), size)
        with self._lock:
            self._round += 1
            for buffer in self._buffers:
                if buffer.nbytes == size + ALIGNMENT and sys.getrefcount(buffer) == _REFERENCES_OF_A_FREE_ONE:
                    break
            else:
                self._give_back()
                buffer = np.empty(size + ALIGNMENT, np.uint8)
                self._buffers.append(buffer)
            self._last_used[size + ALIGNMENT] = self._round
            return _aligned(buffer, size)

    def _give_back(self) -> None:
        idle = {size for size, used in self._last_used.items() if self._round - used > _IDLE_ROUNDS}
        if idle:
            self._buffers = [buffer for buffer in self._buffers if buffer.nbytes not in idle]
            self._last_used = {size: used for size, used in self._last_used.items() if size not in idle}


def _aligned(buffer: np.ndarray, size: int) -> np.ndarray:
    start = -buffer.__array_interface__["data"][0] % ALIGNMENT
    return buffer[start : start + size]
