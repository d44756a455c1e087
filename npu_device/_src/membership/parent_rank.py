"""Tell ranks from their children: processes that a rank has started, and that inherit the variables which made it a
rank.

A rank marks its environment. A process that finds the mark of another one is a child, unless the variables that
describe a rank have changed since: then a launcher, or the rank itself, has made it a rank of another job.

Before that, whoever imports the package with the variables of a rank marks itself as a candidate. A process that finds
the mark of a candidate may be its child, or a rank that the candidate only starts; so at the rendezvous it waits for a
while, whether the candidate comes, too.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from dataclasses import asdict
from typing import Any

from npu_device._src import environment
from npu_device._src.cluster.description import ParentRank
from npu_device._src.cluster.roster import is_running, start_time

_NAMES = """
RANK_TABLE_FILE RANK_ID RANK_SIZE POD_NAME CM_CHIEF_IP CM_CHIEF_PORT CM_CHIEF_DEVICE CM_WORKER_SIZE CM_WORKER_IP
JOB_ID HCCL_IF_BASE_PORT TF_CONFIG RANK WORLD_SIZE MASTER_ADDR MASTER_PORT JAX_NUM_PROCESSES JAX_PROCESS_ID
JAX_COORDINATOR_ADDRESS SLURM_STEP_NUM_TASKS SLURM_PROCID SLURM_JOB_ID SLURM_STEP_ID OMPI_COMM_WORLD_SIZE
OMPI_COMM_WORLD_RANK PMIX_NAMESPACE PMI_SIZE PMI_RANK MPI_LOCALRANKID MPI_LOCALNRANKS PALS_RANKID PALS_APID
NPU_DEVICE_LAUNCHER NPU_DEVICE_HUB
"""
OF_A_RANK = tuple(variable for variable in environment.ALL if variable.name in _NAMES.split())
# Devices tell ranks apart only where nothing numbers these. Elsewhere a rank may give a child another device.
_DEVICES = (environment.ASCEND_DEVICE_ID, environment.DEVICE_ID)


def mark(rank: ParentRank) -> None:
    """Mark the environment of this process, which has become the rank, or is a child of it."""
    _mark(**asdict(rank))


def mark_as_candidate() -> None:
    """Mark the environment of this process, which may become a rank, unless its parent is a rank or a candidate."""
    # A process without any of these variables can't become a rank.
    if not any(variable.is_set() for variable in OF_A_RANK):
        return
    mark = _mark_of_another_process()
    if mark is None or ("rank" not in mark and not is_running(mark["pid"], mark["since"])):
        _mark(pid=os.getpid())


def is_candidate() -> bool:
    """Return True if this process has marked itself, and hasn't become a rank since, nor failed to."""
    mark = _mark_in_environment()
    return mark.get("pid") == os.getpid() and "rank" not in mark


def _mark(pid: int, **fields: Any) -> None:
    # The start time goes with the process id, which may be used again.
    fields = {"since": start_time(pid), "variables": _fingerprint(), "pid": pid, **fields}
    environment.NPU_DEVICE_RANK_PROCESS.set(json.dumps(fields, separators=(",", ":")))


def inherited() -> ParentRank | None:
    """Return the rank whose child this process is, by its environment; None if it isn't a child."""
    mark = _mark_of_another_process()
    if mark is None or "rank" not in mark:
        return None
    del mark["since"]
    try:
        return ParentRank(**mark)
    except TypeError:
        # A different version of the package has written the mark.
        return None


def candidate() -> int | None:
    """Return the id of the running process that has started this one, and may become the rank itself."""
    mark = _mark_of_another_process()
    if mark is None or "rank" in mark or not is_running(mark["pid"], mark["since"]):
        return None
    return int(mark["pid"])


def _mark_of_another_process() -> dict[str, Any] | None:
    """Return what the mark of another process holds, if it has the same variables."""
    mark = _mark_in_environment()
    pid = mark.get("pid")
    # There is no mark, or this process has made it itself.
    if pid is None or (pid == os.getpid() and mark["since"] == start_time(pid)):
        return None
    # Different variables show that a launcher has made this process a rank of another job.
    if mark.pop("variables") != _fingerprint():
        return None
    return mark


def _mark_in_environment() -> dict[str, Any]:
    """Return the mark that this process has or inherits; empty if there is none that this version has written."""
    with contextlib.suppress(ValueError):
        mark = json.loads(environment.NPU_DEVICE_RANK_PROCESS.raw() or "")
        if isinstance(mark, dict) and mark.keys() >= {"pid", "since", "variables"}:
            return mark
    return {}


def _fingerprint() -> str:
    """Return a digest of the variables that make this process a rank."""
    rank = environment.RANK_ID.raw()
    variables = OF_A_RANK
    if rank is None or not rank.strip().isdecimal():
        variables = (*OF_A_RANK, *_DEVICES)
    texts = [(variable.name, variable.raw()) for variable in variables]
    encoded = repr(texts).encode(errors="surrogateescape")
    return hashlib.sha256(encoded).hexdigest()[:16]
