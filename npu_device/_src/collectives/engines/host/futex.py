"""Counters in shared memory that other processes can sleep on: Linux's futex, through the C library.

A waiting thread spins briefly first, since a peer on another core often comes within microseconds, and then
sleeps in the kernel, where it uses no core and wakes within tens of microseconds (measured, docs/notes.md). The
sleep is cut into slices, so that the waiting rank can check the others in between.
"""

from __future__ import annotations

import ctypes
import mmap
import platform
import sys

SLICE_SECONDS = 0.1
"""The longest that a rank sleeps before it checks whether the others are still alive."""

_BRIEF_SECONDS = 0.001
_WAIT, _WAKE = 0, 1
_ALL = 0x7FFFFFFF
_HALF = 1 << 31
_MASK = (1 << 32) - 1

# Only for processors whose stores become visible to other processes in program order: Python has no memory
# barriers. The number is that of the system call.
_SYSTEM_CALLS = {"x86_64": 202}


class _Timespec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


_slice, _brief_slice = (_Timespec(0, int(seconds * 1e9)) for seconds in (SLICE_SECONDS, _BRIEF_SECONDS))
_number = _SYSTEM_CALLS.get(platform.machine(), 0) if sys.platform == "linux" else 0
_system_call = getattr(ctypes.CDLL(None), "syscall", None) if _number else None
if _system_call is not None:
    _system_call.argtypes = [ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p]
    _system_call.restype = ctypes.c_long
_slice_address, _brief_address = ctypes.addressof(_slice), ctypes.addressof(_brief_slice)


def is_supported() -> bool:
    """Return whether this machine has what the counters need: Linux on x86-64."""
    return _system_call is not None


class Counter:
    """A number that increases, written by one process and read by others; it wraps around at 2**32.

    Args:
        memory: the mapping.
        offset: where in it, in bytes; a multiple of 4, and best of 64.
    """

    def __init__(self, memory: mmap.mmap, offset: int) -> None:
        self._word = ctypes.c_uint32.from_buffer(memory, offset)
        self._address = ctypes.addressof(self._word)

    def advance_to(self, number: int) -> None:
        """Write the number, and wake the threads that sleep on it."""
        self._word.value = number & _MASK
        self.wake()

    def read(self) -> int:
        """Return the number."""
        return self._word.value

    def wake(self) -> None:
        """Wake the threads that sleep on it, though nothing has changed."""
        _system_call(_number, self._address, _WAKE, _ALL, None)  # type: ignore[misc]

    def has_reached(self, number: int) -> bool:
        """Return whether the counter has reached the number."""
        return (self._word.value - number) & _MASK < _HALF

    def wait_for(self, number: int, looks: int, briefly: bool = False) -> bool:
        """Spin ``looks`` times, then sleep until the counter reaches a number, for at most ``SLICE_SECONDS``, or a
        millisecond if ``briefly``. Return whether it has reached the number.
        """
        for _ in range(looks):
            if self.has_reached(number):
                return True
        seen = self._word.value
        if (seen - number) & _MASK >= _HALF:
            limit = _brief_address if briefly else _slice_address
            _system_call(_number, self._address, _WAIT, seen, limit)  # type: ignore[misc]
        return self.has_reached(number)
