"""The environment of each rank: variables that the launcher sets, as Ascend's launch scripts do, and those it removes.

The launcher passes on its whole environment; reading single variables is left to ``environment``, reading rank tables
to ``membership``.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping

from npu_device._src.environment import NPU_DEVICE_RANK_PROCESS
from npu_device._src.horovod import modules
from npu_device.launch.arguments import Options
from npu_device.launch.meeting import Meeting

# The other two ways to describe a job. They contradict a rank table, and the ranks would refuse both.
_OTHER_SCHEMES = ("CM_CHIEF_IP", "CM_CHIEF_PORT", "CM_CHIEF_DEVICE", "CM_WORKER_SIZE", "CM_WORKER_IP", "TF_CONFIG")


def replaced(inherited: Mapping[str, str]) -> list[str]:
    """Return the names of the variables that describe another job, which the ranks won't see."""
    return [name for name in ("RANK_TABLE_FILE", *_OTHER_SCHEMES) if inherited.get(name)]


def for_rank(
    inherited: Mapping[str, str],
    options: Options,
    meeting: Meeting,
    *,
    rank: int,
    local_rank: int,
    table: str,
    error_file: str,
    progress_file: str | None,
    trace: str | None,
) -> dict[str, str]:
    foreign = {*_OTHER_SCHEMES, NPU_DEVICE_RANK_PROCESS.name}  # a rank that starts npurun starts another job
    environment = {name: value for name, value in inherited.items() if name not in foreign}
    environment.update(
        RANK_TABLE_FILE=table,
        RANK_ID=str(rank),
        RANK_SIZE=str(len(meeting.nodes) * options.nproc_per_node),
        ASCEND_DEVICE_ID=str(local_rank),
        DEVICE_ID=str(local_rank),
        JOB_ID=meeting.job_id,
        NPU_DEVICE_LAUNCHER="off",  # npurun may itself be a task of Slurm's or MPI's
        NPU_DEVICE_ERROR_FILE=error_file,
        NPU_DEVICE_HUB=str(meeting.port),
        NPU_DEVICE_RESTART_COUNT=str(meeting.count),
        NPU_DEVICE_PROGRESS_FILE=progress_file or "",
        NPU_DEVICE_PREEMPT_SIGNAL=signal.Signals(options.preempt_signal).name,
        NPU_DEVICE_PREEMPT_TIMEOUT=f"{options.preempt_timeout:g}",
        PYTHONUNBUFFERED="1",  # else a rank's output would come in blocks, and a killed rank's last block never
    )
    if options.replicate:
        environment.setdefault("PYTHONHASHSEED", str(options.seed))
    if meeting.made_secret is not None:
        environment.update(NPU_DEVICE_SECRET=meeting.made_secret)
    if options.horovod:
        environment.update(modules.variables(environment))
    if trace is not None:
        environment.update(PROFILING_MODE="true", PROFILING_OPTIONS=json.dumps({"output": os.path.abspath(trace)}))
    return environment
