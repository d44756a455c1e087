"""Memory shared by the processes of one user on one host, without a name that could outlive them.

The kernel's anonymous files (``memfd_create``) are in no directory: nothing is left in /dev/shm, however the
processes end, and its size doesn't matter. Others open the file through ``/proc/<pid>/fd``, which the kernel allows to
the same user in the same PID namespace only.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from pathlib import Path

from npu_device._src.collectives.engines.host import futex

PAGE = mmap.PAGESIZE


def is_supported() -> bool:
    """Return whether this process can share memory in this way."""
    return futex.is_supported() and hasattr(os, "memfd_create")


class Offer:
    """New memory, zeros, that other processes may open until it is withdrawn or this process ends.

    Attributes:
        memory: the mapping.
        path: the path that the others open.

    Raises:
        OSError: the system has no memory left.
    """

    def __init__(self, size: int) -> None:
        self._descriptor = os.memfd_create("npu_device", os.MFD_CLOEXEC)
        try:
            os.fchmod(self._descriptor, 0o600)
            os.ftruncate(self._descriptor, size)
            self.memory = mmap.mmap(self._descriptor, size)
        except (OSError, ValueError):
            os.close(self._descriptor)
            raise
        self.path = f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def withdraw(self) -> None:
        """Prevent further processes from opening it; those that have mapped it keep it."""
        with contextlib.suppress(OSError):
            os.close(self._descriptor)


def attach(path: str, size: int) -> mmap.mmap:
    """Map the memory behind the path of another process.

    Raises:
        OSError: the process has ended, belongs to another user, or is in another PID namespace.
        ValueError: the memory is smaller than expected.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        return mmap.mmap(descriptor, size)
    finally:
        os.close(descriptor)


def identity() -> str:
    """Return what processes that can share memory have in common: the running kernel, the PID namespace, the user.

    Raises:
        OSError: no /proc.
    """
    kernel = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{kernel} {os.readlink('/proc/self/ns/pid')} {os.getuid()}"
