"""Find which ranks share memory: those of one host that proved it when the job began. And learn all ranks' devices.

A common host name only means that ranks may try. The lowest rank of each host writes a random text into
memory, the others must find it there, and every rank learns the outcome, so that all choose the same engine.
"""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import tensorflow as tf

from npu_device._src import compat, environment
from npu_device._src.cluster.errors import ClusterError
from npu_device._src.cluster.time_limits import LATEST_ANSWER_SECONDS
from npu_device._src.collectives.engines.host import memory_offer
from npu_device._src.collectives.gpu_choice import Device
from npu_device._src.collectives.job import Job

_log = logging.getLogger("npu_device")
_TOKEN_BYTES = 16


@dataclass(frozen=True)
class Hosts:
    """The outcome, the same on every rank.

    Attributes:
        leaders: for each rank the lowest rank with which it shares memory; the rank itself when there is none.
        devices: of each rank.
        late: ranks on which TensorFlow has already made its devices.
        problems: for each rank why it can't share memory with the lowest rank of its host; "" if it can.
        engine: the one between hosts (``engine_choice``).
        no_nccl: why floating-point tensors don't go from GPU to GPU; "" if they do.
    """

    leaders: tuple[int, ...]
    devices: tuple[Device, ...]
    late: tuple[int, ...]
    problems: tuple[str, ...]
    engine: str = ""
    no_nccl: str = ""

    @property
    def needs_server(self) -> bool:
        """Return whether tensors go through TensorFlow's collectives, which need its server."""
        return self.engine == "nccl" or (self.engine == "tensorflow" and not self.share_memory)

    @property
    def share_memory(self) -> bool:
        """Return whether all ranks share memory."""
        return len(set(self.leaders)) == 1

    def uses_nccl(self, dtype: tf.DType) -> bool:
        """Return whether tensors of a dtype go from GPU to GPU; the same on every rank. All others go through the
        hosts' memories, wherever they are.
        """
        return bool(dtype.is_floating) and self.engine == "nccl"


def detect_hosts(job: Job, device: Device) -> Hosts:
    """Find out which ranks share memory, and which devices they have. Called once on every rank, when all have met.

    Args:
        job: the job.
        device: this rank's device.

    Raises:
        ClusterError: ``NPU_DEVICE_SHARED_MEMORY`` is ``required`` while ranks of one host can't share memory.
        TimeoutError: a rank did not come.
    """
    cluster, store = job.cluster, job.store
    wanted = _wanted(cluster.rank)
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
        first = {host: rank for rank, host in reversed(list(enumerate(cluster.hosts)))}
        leaders = tuple(
            rank if problem else first[host] for rank, (problem, host) in enumerate(zip(problems, cluster.hosts))
        )
    late_ranks = tuple(rank for rank, is_late in enumerate(late) if is_late)
    devices = tuple(Device(**each) for each in described)
    return Hosts(leaders, devices, late_ranks, tuple(problems))


def _wanted(rank: int) -> str:
    """Return ``NPU_DEVICE_SHARED_MEMORY``, or what stands for it; the same on all ranks."""
    if environment.NPU_DEVICE_BACKEND.get() != "shared_memory":
        return environment.NPU_DEVICE_SHARED_MEMORY.get()
    if rank == 0:
        _log.warning(
            "NPU_DEVICE_BACKEND=shared_memory stands for NPU_DEVICE_SHARED_MEMORY=required in this release, and will "
            "be an error in the next: NPU_DEVICE_BACKEND now names the engine between hosts.\n"
            "What to do: set NPU_DEVICE_SHARED_MEMORY=required, and unset NPU_DEVICE_BACKEND."
        )
    return "required"


def _card(leads: bool) -> tuple[dict[str, Any], memory_offer.Offer | None]:
    """Return this rank's message to the others of its host, and the memory in which they find its token."""
    card: dict[str, Any] = {"who": "", "problem": "", "path": ""}
    if not memory_offer.is_supported():
        return {**card, "problem": "needs Linux on x86-64 with memfd_create"}, None
    try:
        card["who"] = memory_offer.identity()
        if not leads:
            return card, None
        offer = memory_offer.Offer(memory_offer.PAGE)
    except OSError as error:
        return {**card, "problem": f"no shared memory: {error}"}, None
    token = secrets.token_hex(_TOKEN_BYTES)
    offer.memory[: 2 * _TOKEN_BYTES] = token.encode()
    return {**card, "path": offer.path, "token": token}, offer


def _search(mine: dict[str, Any], leader: dict[str, Any]) -> str:
    """Look for the leader's token in its memory; return the problem, or "" if there is none."""
    if leader["problem"]:
        return str(leader["problem"])
    if mine["who"] != leader["who"]:
        return "a different kernel, PID namespace (container) or user than the lowest rank of the host"
    try:
        with memory_offer.attach(leader["path"], memory_offer.PAGE) as memory:
            if memory[: 2 * _TOKEN_BYTES] != leader["token"].encode():
                return "the lowest rank of the host has different memory under the same path"
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
