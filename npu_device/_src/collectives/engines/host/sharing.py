"""Memory that processes of one user on one host share, without a name that could outlive them: which ranks can, and how
a group's members get theirs.

The kernel's anonymous files (``memfd_create``) are in no directory: nothing is left in /dev/shm, however the processes
end, and its size doesn't matter. Others open the file through ``/proc/<pid>/fd``, which the kernel allows to the same
user in the same PID namespace only.

A common host name only means that ranks may try. When the job begins, the lowest rank of each host writes a random text
into memory, the others must find it there, and every rank learns the outcome and all devices.
"""

from __future__ import annotations

import contextlib
import json
import logging
import mmap
import os
import secrets
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Callable

import tensorflow as tf

from npu_device._src import compat, environment
from npu_device._src.cluster.errors import ClusterError
from npu_device._src.cluster.time_limits import LATEST_ANSWER_SECONDS, MEMORY_RETRY_SECONDS
from npu_device._src.collectives.engines.host.memory_ring import has_counters
from npu_device._src.collectives.gpu_choice import Device
from npu_device._src.collectives.group import Group
from npu_device._src.collectives.job import Job

_log = logging.getLogger("npu_device")

PAGE = mmap.PAGESIZE
_TOKEN_BYTES = 32

# TensorFlow 2.20 refuses bfloat16 ("Collective all-reduce does not support datatype DT_BFLOAT16 on DEVICE_GPU").
_NCCL_DTYPES = (tf.float16, tf.float32, tf.float64)

FIRST_BYTE = PAGE
"""Where the members' own data begins; the page before it says which memory this is, and which members have come."""


def is_supported() -> bool:
    """Return whether this process can share memory in this way."""
    return has_counters() and hasattr(os, "memfd_create")


class Offer:
    """New memory, zeros, that other processes may open by its path until it is withdrawn or this process ends. It
    begins with the token, a random text by which they recognize it.
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
        self.path, self.token = f"/proc/{os.getpid()}/fd/{self._descriptor}", secrets.token_hex(_TOKEN_BYTES // 2)
        self.memory[:_TOKEN_BYTES] = self.token.encode()

    def withdraw(self) -> None:
        """Prevent further processes from opening it; those that have mapped it keep it."""
        with contextlib.suppress(OSError):
            os.close(self._descriptor)


def attach(path: str, size: int, token: str) -> mmap.mmap:
    """Map the memory behind the path of another process; raise OSError if it can't be opened, and ValueError if it is
    too small or has another token.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        memory = mmap.mmap(descriptor, size)
    finally:
        os.close(descriptor)
    if memory[:_TOKEN_BYTES] != token.encode():
        memory.close()
        raise ValueError("different memory under the same path")
    return memory


def connect(job: Job, group: Group, size: int) -> tuple[mmap.mmap, Callable[[], None]]:
    """Share memory with the other members of a group. The first member to come makes it, so nothing waits here.
    Return the mapping, ``FIRST_BYTE`` bytes longer than ``size``; and what to call when all members have come, or when
    the group is destroyed: it withdraws the offer.
    """
    key = f"group/{group.name}/{'-'.join(map(str, group.ranks))}/memory"
    deadline = time.monotonic() + LATEST_ANSWER_SECONDS
    problem: Exception = TimeoutError("its members were still leaving a group of the same name")
    while time.monotonic() < deadline:
        try:
            if (offered := _offer(job, group, key, size)) is not None:
                return offered
            if (memory := _join(job, group, key, size)) is not None:
                return memory, lambda: None
        except OSError as error:
            problem = error
            time.sleep(MEMORY_RETRY_SECONDS)
        job.health.require_running()
    raise ClusterError(
        f"{job.cluster.name} could not get {size >> 20} MiB of memory for group {group.name!r}: {problem}\n"
        "What to do: free memory, or set NPU_DEVICE_SHARED_MEMORY=off on all ranks."
    ) from problem


def _offer(job: Job, group: Group, key: str, size: int) -> tuple[mmap.mmap, Callable[[], None]] | None:
    withdrawal = contextlib.ExitStack()  # which runs once
    offer = Offer(FIRST_BYTE + size)
    withdrawal.callback(offer.withdraw)
    offer.memory[_TOKEN_BYTES + group.rank] = 1
    try:
        job.store.set(key, f"{offer.token} {offer.path}")
    except BaseException as error:
        withdrawal.close()
        offer.memory.close()
        if isinstance(error, KeyError):
            return None
        raise
    withdrawal.callback(_forget, job, key)
    return offer.memory, withdrawal.close


def _forget(job: Job, key: str) -> None:
    with contextlib.suppress(ClusterError):
        job.store.delete(key)


def _join(job: Job, group: Group, key: str, size: int) -> mmap.mmap | None:
    """Map the memory that another member has made, unless it belongs to an earlier group of this name."""
    try:
        token, path = job.store.get(key, MEMORY_RETRY_SECONDS).split(" ", 1)
        memory = attach(path, FIRST_BYTE + size, token)
    except (TimeoutError, ValueError):
        return None
    mine = _TOKEN_BYTES + group.rank
    if memory[mine]:
        memory.close()
        return None
    memory[mine] = 1
    return memory


# Which ranks share memory


@dataclass(frozen=True)
class Hosts:
    """What the ranks know of each other, the same on every rank."""

    leaders: tuple[int, ...]  # for each rank the lowest rank with which it shares memory, or the rank itself
    devices: tuple[Device, ...]  # of each rank
    late: tuple[int, ...]  # ranks on which TensorFlow has already made its devices
    problems: tuple[str, ...]  # for each rank why it can't share memory with the lowest rank of its host; "" if it can
    engine: str = ""  # the one between hosts (``engine_choice``)
    no_nccl: str = ""  # why floating-point tensors don't go from GPU to GPU; "" if they do

    @property
    def needs_server(self) -> bool:
        return self.engine == "nccl" or (self.engine == "tensorflow" and not self.share_memory)

    @property
    def share_memory(self) -> bool:
        return len(set(self.leaders)) == 1

    def uses_nccl(self, dtype: tf.DType) -> bool:
        """Return whether tensors of a dtype go from GPU to GPU; the same on every rank. All others go through the
        hosts' memories, wherever they are.
        """
        return self.engine == "nccl" and dtype in _NCCL_DTYPES


def detect_hosts(job: Job, device: Device) -> Hosts:
    """Find out which ranks share memory, and which devices they have. Called once on every rank, when all have met."""
    cluster, store, wanted = job.cluster, job.store, environment.NPU_DEVICE_SHARED_MEMORY.get()
    if environment.NPU_DEVICE_BACKEND.get() == "shared_memory":
        wanted = "required"
        if cluster.rank == 0:
            _log.warning(
                "NPU_DEVICE_BACKEND=shared_memory stands for NPU_DEVICE_SHARED_MEMORY=required in this release, and "
                "will be an error in the next: NPU_DEVICE_BACKEND now names the engine between hosts.\n"
                "What to do: set NPU_DEVICE_SHARED_MEMORY=required, and unset NPU_DEVICE_BACKEND."
            )
    card, offer = _card(cluster.local_rank == 0)
    key = f"memory/{cluster.hosts.index(cluster.host)}"
    if cluster.local_rank == 0:
        store.set(key, json.dumps(card))
        problem = card["problem"]
    else:
        problem = card["problem"] or _search(card, json.loads(store.get(key, LATEST_ANSWER_SECONDS)))
    found = store.gather("memory", [problem, asdict(device), compat.context_is_initialized()], LATEST_ANSWER_SECONDS)
    problems, described, late = zip(*found)
    if offer is not None:  # all ranks have looked
        offer.withdraw()
        offer.memory.close()
    if wanted == "off":
        leaders = tuple(range(cluster.world_size))
    else:
        _report(wanted, problems, cluster.hosts, cluster.rank)
        lowest = map(cluster.hosts.index, cluster.hosts)
        leaders = tuple(rank if problems[rank] else first for rank, first in enumerate(lowest))
    late_ranks = tuple(rank for rank, is_late in enumerate(late) if is_late)
    return Hosts(leaders, tuple(Device(**each) for each in described), late_ranks, tuple(problems))


def _card(leads: bool) -> tuple[dict[str, Any], Offer | None]:
    """Return the message to the other ranks of the host, and of the one that leads, memory with its token."""
    if not is_supported():
        return {"problem": "needs Linux on x86-64 with memfd_create"}, None
    try:
        # What processes that can share memory have in common: the running kernel, the PID namespace, the user.
        kernel = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        who = f"{kernel} {os.readlink('/proc/self/ns/pid')} {os.getuid()}"
        offer = Offer(PAGE) if leads else None
    except OSError as error:
        return {"problem": f"no shared memory: {error}"}, None
    card = {"who": who, "problem": ""}
    return ({**card, "path": offer.path, "token": offer.token} if offer else card), offer


def _search(mine: dict[str, Any], leader: dict[str, Any]) -> str:
    """Look for the leader's token in its memory; return the problem, or "" if there is none."""
    if leader["problem"]:
        return str(leader["problem"])
    if mine["who"] != leader["who"]:
        return "a different kernel, PID namespace (container) or user than the lowest rank of the host"
    try:
        attach(leader["path"], PAGE, leader["token"]).close()
    except (OSError, ValueError) as error:
        return f"can't open the memory of the lowest rank of the host: {error}"
    return ""


def _report(wanted: str, problems: Sequence[str], hosts: Sequence[str], rank: int) -> None:
    """Report the ranks that can't share memory although their host has others."""
    alone = [other for other, problem in enumerate(problems) if problem and hosts.count(hosts[other]) > 1]
    if not alone:
        return
    lines = "\n".join(f"  rank {other} on host {hosts[other]}: {problems[other]}" for other in alone)
    if wanted == "required":
        raise ClusterError(
            f"NPU_DEVICE_SHARED_MEMORY is required, but ranks of one host can't share memory:\n{lines}\n"
            "What to do: start all ranks of a host as one user in one container, or unset NPU_DEVICE_SHARED_MEMORY: "
            "these ranks then use the engine between hosts."
        )
    if rank == 0:
        _log.warning("ranks of one host can't share memory; they use the slower engine between hosts:\n%s", lines)
