"""Which ranks share memory, and which devices they have: found out once, when the job begins.

A common host name only means that ranks may try. The lowest rank of each host writes a random text into memory, the
others must find it there, and every rank learns the outcome and all devices.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from npu_device._src import compat, environment
from npu_device._src.cluster.rank_errors import ClusterError
from npu_device._src.cluster.time_limits import LATEST_ANSWER_SECONDS
from npu_device._src.collectives.engines.context import EngineContext
from npu_device._src.collectives.engines.host.memory_ring import is_supported
from npu_device._src.collectives.engines.host.sharing import PAGE, Offer, attach
from npu_device._src.collectives.gpu_choice import Device
from npu_device._src.collectives.hosts_of_job import JobHosts

_log = logging.getLogger("npu_device")


def detect_hosts(context: EngineContext, device: Device) -> JobHosts:
    """Find out which ranks share memory, and which devices they have. Called once on every rank, when all have met."""
    cluster = context.cluster
    control = context.control
    wanted = _wanted(cluster.rank)
    announcement, offer = _announcement(cluster.local_rank == 0)
    key = f"memory/{cluster.hosts.index(cluster.host)}"
    if cluster.local_rank == 0:
        control.set(key, json.dumps(announcement))
        # The leader also sets its announcement if it can't share memory: the others would wait for the key.
        problem = announcement["problem"]
    else:
        leader = json.loads(control.get(key, LATEST_ANSWER_SECONDS))
        problem = announcement["problem"] or _search(announcement, leader)
    # TensorFlow's context must not exist yet when its server starts (``late_ranks``).
    fact = [problem, asdict(device), compat.context_is_initialized()]
    facts = control.gather("memory", fact, LATEST_ANSWER_SECONDS)
    problems, devices, late = zip(*facts)
    # Every rank has looked at the offer by now.
    if offer is not None:
        offer.withdraw()
        offer.memory.close()
    # Then each rank is like a host of its own.
    if wanted == "off":
        leaders = tuple(range(cluster.world_size))
    else:
        _report(wanted, problems, cluster.hosts, cluster.rank)
        lowest_ranks = map(cluster.hosts.index, cluster.hosts)
        leaders = tuple(
            rank if problems[rank] else leader for rank, leader in enumerate(lowest_ranks)
        )
    late_ranks = tuple(rank for rank, is_late in enumerate(late) if is_late)
    all_devices = tuple(Device(**fields) for fields in devices)
    return JobHosts(leaders, all_devices, late_ranks, tuple(problems))


def _wanted(rank: int) -> str:
    """Return whether ranks of one host are to share memory: on, off or required."""
    if environment.NPU_DEVICE_BACKEND.get() != "shared_memory":
        return environment.NPU_DEVICE_SHARED_MEMORY.get()
    if rank == 0:
        _log.warning(
            "NPU_DEVICE_BACKEND=shared_memory stands for NPU_DEVICE_SHARED_MEMORY=required in this release, and "
            "will be an error in the next: NPU_DEVICE_BACKEND now names the engine between hosts.\n"
            "What to do: set NPU_DEVICE_SHARED_MEMORY=required, and unset NPU_DEVICE_BACKEND."
        )
    return "required"


def _announcement(leads: bool) -> tuple[dict[str, Any], Offer | None]:
    """Return the message to the other ranks of the host, and of the one that leads, memory with its token."""
    if not is_supported():
        return {"problem": "needs Linux on x86-64 with memfd_create"}, None
    try:
        # What processes that can share memory have in common: the running kernel, the PID namespace, the user.
        kernel = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        identity = f"{kernel} {os.readlink('/proc/self/ns/pid')} {os.getuid()}"
        announcement = {"who": identity, "problem": ""}
        if not leads:
            return announcement, None
        offer = Offer(PAGE)
    except OSError as error:
        return {"problem": f"no shared memory: {error}"}, None
    return {**announcement, "path": offer.path, "token": offer.token}, offer


def _search(announcement: dict[str, Any], leader: dict[str, Any]) -> str:
    """Look for the leader's token in its memory; return the problem, or "" if there is none."""
    if leader["problem"]:
        return str(leader["problem"])
    if announcement["who"] != leader["who"]:
        return (
            "a different kernel, PID namespace (container) or user than the lowest rank of the host"
        )
    try:
        # Announcements that agree prove nothing; only reading the token does.
        attach(leader["path"], PAGE, leader["token"]).close()
    except (OSError, ValueError) as error:
        return f"can't open the memory of the lowest rank of the host: {error}"
    return ""


def _report(wanted: str, problems: Sequence[str], hosts: Sequence[str], rank: int) -> None:
    """Report the ranks that can't share memory although their host has others."""
    alone = []
    for member, problem in enumerate(problems):
        # A rank that is alone on its host has nobody to share memory with, so its problem is no
        # news.
        if problem and hosts.count(hosts[member]) > 1:
            alone.append(member)
    if not alone:
        return
    lines = "\n".join(
        f"  rank {member} on host {hosts[member]}: {problems[member]}" for member in alone
    )
    if wanted == "required":
        raise ClusterError(
            f"NPU_DEVICE_SHARED_MEMORY is required, but ranks of one host can't share memory:\n{lines}\n"
            "What to do: start all ranks of a host as one user in one container, or unset NPU_DEVICE_SHARED_MEMORY: "
            "these ranks then use the engine between hosts."
        )
    # All ranks know the same facts: rank 0 reports for all.
    if rank == 0:
        _log.warning(
            "ranks of one host can't share memory; they use the slower engine between hosts:\n%s",
            lines,
        )
