"""Memory that the process has freed, and keeps for the next collective.

TensorFlow's transfers allocate buffers of some MB each time. By default, glibc soon returns those to the system, and
then takes fresh pages from it, which costs more than to copy them (docs/notes.md).
"""

from __future__ import annotations

import ctypes

from npu_device._src import environment

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # from malloc.h
_MOST = 2**31 - 1  # mallopt takes an int


def keep() -> None:
    """Let glibc keep freed memory from now on. Another C library isn't changed."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, min(_MOST, environment.MALLOC_MMAP_THRESHOLD_.get()))
        mallopt(_M_TRIM_THRESHOLD, min(_MOST, environment.MALLOC_TRIM_THRESHOLD_.get()))
