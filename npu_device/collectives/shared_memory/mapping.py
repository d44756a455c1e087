"""Memory that the processes of one user on one host have in common, without a name that could outlive them.

The kernel's anonymous files (``memfd_create``) have no place in any directory: nothing is left in /dev/shm, however the
processes end, and its size doesn't matter. Others open the file through ``/proc/<pid>/fd``, which the kernel allows to
the same user in the same PID namespace only.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path

from npu_device.collectives.shared_memory import futex

PAGE = mmap.PAGESIZE


def is_supported() -> bool:
    """Whether this process can share memory in this way."""
    return futex.is_supported() and hasattr(os, "memfd_create")


def create(size: int) -> tuple[mmap.mmap, str]:
    """New memory, zeros, and the path by which others open it as long as this process lives.

    Raises:
        OSError: the system has none to give.
    """
    descriptor = os.memfd_create("npu_device", os.MFD_CLOEXEC)
    os.fchmod(descriptor, 0o600)
    os.ftruncate(descriptor, size)
    return mmap.mmap(descriptor, size), f"/proc/{os.getpid()}/fd/{descriptor}"


def attach(path: str, size: int) -> mmap.mmap:
    """The memory behind the path of another process.

    Raises:
        OSError: the process has ended, belongs to somebody else, or is in another PID namespace.
        ValueError: the memory is smaller than expected.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        return mmap.mmap(descriptor, size)
    finally:
        os.close(descriptor)


def identity() -> str:
    """What processes that may share memory have in common: the running kernel, the PID namespace, the user.

    Raises:
        OSError: no /proc.
    """
    kernel = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{kernel} {os.readlink('/proc/self/ns/pid')} {os.getuid()}"


def process(pid: int) -> str:
    """When a process of this host was started, as text; empty when it has ended, as a zombie too."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]
