"""Memory that processes of one user on one host share, without a name that could outlive them.

The kernel's anonymous files (``memfd_create``) are in no directory: nothing is left in /dev/shm, however the processes
end, and its size doesn't matter. Others open the file through ``/proc/<pid>/fd``, which the kernel allows to the same
user in the same PID namespace only.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import time
from typing import Callable

from npu_device._src.cluster.rank_errors import ClusterError
from npu_device._src.cluster.time_limits import LATEST_ANSWER_SECONDS, MEMORY_RETRY_SECONDS
from npu_device._src.collectives.engines.context import EngineContext
from npu_device._src.collectives.group import Group

PAGE = mmap.PAGESIZE
_TOKEN_BYTES = 32

FIRST_BYTE = PAGE
"""Where the members' own data begins; the page before it says which memory this is, and which members have come."""


class Offer:
    """New memory, zeros, that other processes may open by its path until it is withdrawn or this process ends. It
    begins with the token, a random text by which they recognize it.
    """

    def __init__(self, size: int) -> None:
        self._descriptor = os.memfd_create("npu_device", os.MFD_CLOEXEC)
        try:
            # The kernel creates these files readable for everybody.
            os.fchmod(self._descriptor, 0o600)
            os.ftruncate(self._descriptor, size)
            self.memory = mmap.mmap(self._descriptor, size)
        except (OSError, ValueError):
            os.close(self._descriptor)
            raise
        self.path = f"/proc/{os.getpid()}/fd/{self._descriptor}"
        self.token = secrets.token_hex(_TOKEN_BYTES // 2)
        self.memory[:_TOKEN_BYTES] = self.token.encode()

    def withdraw(self) -> None:
        """Prevent further processes from opening it; those that have mapped it keep it."""
        with contextlib.suppress(OSError):
            os.close(self._descriptor)


class ReadOnlyMemory(mmap.mmap):
    """Memory that this process can't write to; a class of its own, by which arrays that lie in it are recognized."""


def attach(path: str, size: int, token: str, read_only: bool = False) -> mmap.mmap:
    """Map the memory behind the path of another process; raise OSError if it can't be opened, and ValueError if it is
    too small or has another token.
    """
    access = os.O_RDWR
    if read_only:
        access = os.O_RDONLY
    descriptor = os.open(path, access | os.O_CLOEXEC)
    try:
        if read_only:
            memory: mmap.mmap = ReadOnlyMemory(descriptor, size, prot=mmap.PROT_READ)
        else:
            memory = mmap.mmap(descriptor, size)
    finally:
        os.close(descriptor)
    if memory[:_TOKEN_BYTES] != token.encode():
        memory.close()
        raise ValueError("different memory under the same path")
    return memory


def connect(
    context: EngineContext, group: Group, size: int
) -> tuple[mmap.mmap, Callable[[], None]]:
    """Share memory with the other members of a group. The first member to come makes it, so nothing waits here.
    Return the mapping, ``FIRST_BYTE`` bytes longer than ``size``; and what to call when all members have come, or when
    the group is destroyed: it withdraws the offer.
    """
    key = f"group/{group.name}/{'-'.join(map(str, group.ranks))}/memory"
    deadline = time.monotonic() + LATEST_ANSWER_SECONDS
    problem: Exception = TimeoutError("its members were still leaving a group of the same name")
    while time.monotonic() < deadline:
        try:
            if (offered := _offer(context, group, key, size)) is not None:
                return offered
            if (memory := _join(context, group, key, size)) is not None:
                return memory, lambda: None
        except OSError as error:
            # The offer may just have been withdrawn, or memory be short for a moment.
            problem = error
            time.sleep(MEMORY_RETRY_SECONDS)
        context.health.require_running()
    raise ClusterError(
        f"{context.cluster.name} could not get {size >> 20} MiB of memory for group {group.name!r}: {problem}\n"
        "What to do: free memory, or set NPU_DEVICE_SHARED_MEMORY=off on all ranks."
    ) from problem


def _offer(
    context: EngineContext, group: Group, key: str, size: int
) -> tuple[mmap.mmap, Callable[[], None]] | None:
    # An exit stack runs what it holds only once, however often it is closed.
    withdrawal = contextlib.ExitStack()
    offer = Offer(FIRST_BYTE + size)
    withdrawal.callback(offer.withdraw)
    # The mark tells the other members that this member has come.
    offer.memory[_TOKEN_BYTES + group.rank] = 1
    try:
        context.control.set(key, f"{offer.token} {offer.path}")
    except BaseException as error:
        withdrawal.close()
        offer.memory.close()
        # The hub refuses a key that exists: another member was first.
        if isinstance(error, KeyError):
            return None
        raise
    withdrawal.callback(_forget, context, key)
    return offer.memory, withdrawal.close


def _forget(context: EngineContext, key: str) -> None:
    with contextlib.suppress(ClusterError):
        context.control.delete(key)


def _join(context: EngineContext, group: Group, key: str, size: int) -> mmap.mmap | None:
    """Map the memory that another member has made, unless it belongs to an earlier group of this name."""
    try:
        token, path = context.control.get(key, MEMORY_RETRY_SECONDS).split(" ", 1)
        memory = attach(path, FIRST_BYTE + size, token)
    except (TimeoutError, ValueError):
        return None
    has_come = _TOKEN_BYTES + group.rank
    if memory[has_come]:
        memory.close()
        return None
    memory[has_come] = 1
    return memory
