"""Memory that processes of one user on one host share, without a name that could outlive them; and a group's members
that connect to it.

The kernel's anonymous files (``memfd_create``) are in no directory: nothing is left in /dev/shm, however the
processes end, and its size doesn't matter. Others open the file through ``/proc/<pid>/fd``, which the kernel allows to
the same user in the same PID namespace only.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import time
from pathlib import Path
from typing import Callable

from npu_device._src.cluster.errors import ClusterError
from npu_device._src.cluster.time_limits import LATEST_ANSWER_SECONDS, MEMORY_RETRY_SECONDS
from npu_device._src.collectives.engines.host.memory_ring import has_counters
from npu_device._src.collectives.group import Group
from npu_device._src.collectives.job import Job

PAGE = mmap.PAGESIZE

_TOKEN_BYTES = 32

FIRST_BYTE = PAGE
"""Where the members' own data begins; the page before it says which memory this is, and which members have come."""


def is_supported() -> bool:
    """Return whether this process can share memory in this way."""
    return has_counters() and hasattr(os, "memfd_create")


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


class Segment:
    """Memory that the members of a group share.

    Attributes:
        memory: the mapping; ``FIRST_BYTE`` bytes longer than asked for.
        check: raises if the collectives of this rank have been stopped.
    """

    def __init__(self, memory: mmap.mmap, check: Callable[[], None], withdraw: Callable[[], None] | None) -> None:
        self.memory = memory
        self.check = check
        self._withdraw = withdraw

    def settle(self) -> None:
        """Withdraw the offer. Called when all members have come, or when the group is destroyed."""
        withdraw, self._withdraw = self._withdraw, None
        if withdraw is not None:
            withdraw()


def connect(job: Job, group: Group, size: int) -> Segment:
    """Share memory with the other members of a group. The first member to come makes it, so nothing waits here.

    Args:
        job: the job.
        group: the members.
        size: bytes.

    Raises:
        ClusterError: there is no memory left, or the hub of the job doesn't answer.
        PeerError: a rank of the group has failed or ended.
    """
    key = f"group/{group.name}/{'-'.join(map(str, group.ranks))}/memory"
    check = job.health.require_running
    deadline = time.monotonic() + LATEST_ANSWER_SECONDS
    problem: Exception = TimeoutError("its members were still leaving a group of the same name")
    while time.monotonic() < deadline:
        try:
            segment = _offer(job, group, key, size, check) or _join(job, group, key, size, check)
        except OSError as error:
            segment, problem = None, error
            time.sleep(MEMORY_RETRY_SECONDS)
        if segment is not None:
            return segment
        check()
    raise ClusterError(
        f"{job.cluster.name} could not get {size >> 20} MiB of memory for group {group.name!r}: {problem}\n"
        "What to do: free memory, or set NPU_DEVICE_SHARED_MEMORY=off on all ranks."
    ) from problem


def _offer(job: Job, group: Group, key: str, size: int, check: Callable[[], None]) -> Segment | None:
    """Make the memory, unless another member has."""
    offer = Offer(FIRST_BYTE + size)
    token = secrets.token_hex(_TOKEN_BYTES // 2)
    offer.memory[:_TOKEN_BYTES] = token.encode()
    offer.memory[_TOKEN_BYTES + group.rank] = 1
    try:
        job.store.set(key, f"{token} {offer.path}")
    except BaseException as error:
        offer.withdraw()
        offer.memory.close()
        if isinstance(error, KeyError):
            return None
        raise

    def withdraw() -> None:
        with contextlib.suppress(ClusterError):
            job.store.delete(key)
        offer.withdraw()

    return Segment(offer.memory, check, withdraw)


def _join(job: Job, group: Group, key: str, size: int, check: Callable[[], None]) -> Segment | None:
    """Map the memory that another member has made, unless it belongs to an earlier group of this name."""
    try:
        token, path = job.store.get(key, MEMORY_RETRY_SECONDS).split(" ", 1)
    except TimeoutError:
        return None
    try:
        memory = attach(path, FIRST_BYTE + size)
    except ValueError:
        return None
    mine = _TOKEN_BYTES + group.rank
    if memory[:_TOKEN_BYTES] != token.encode() or memory[mine]:
        memory.close()
        return None
    memory[mine] = 1
    return Segment(memory, check, None)
