"""The environment of each rank: what the launcher sets as Ascend's launch scripts do, and what it takes away.

The launcher hands its own environment on as a whole; reading single variables is ``npu_device.environment``'s part.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping

# The other two ways to describe a job. With a rank table they are a contradiction, which the ranks would refuse.
_OTHER_SCHEMES = ("CM_CHIEF_IP", "CM_CHIEF_PORT", "CM_CHIEF_DEVICE", "CM_WORKER_SIZE", "CM_WORKER_IP", "TF_CONFIG")


def replaced(inherited: Mapping[str, str]) -> list[str]:
    """Names of the variables that describe another job and that the ranks won't see."""
    return [name for name in ("RANK_TABLE_FILE", *_OTHER_SCHEMES) if inherited.get(name)]


def for_rank(
    inherited: Mapping[str, str],
    *,
    rank: int,
    local_rank: int,
    world_size: int,
    table: str,
    job_id: str,
    error_file: str,
    trace: str | None = None,
) -> dict[str, str]:
    """The whole environment of one rank.

    Args:
        inherited: the launcher's own environment.
        rank: number of the rank in the job.
        local_rank: number of the rank on its node, and of its device.
        world_size: number of ranks in the job.
        table: path of the rank table.
        job_id: name of the job.
        error_file: path where the rank leaves a record of its failure (see ``failures``).
        trace: directory for an iteration trace.
    """
    environment = {name: value for name, value in inherited.items() if name not in _OTHER_SCHEMES}
    environment.update(
        RANK_TABLE_FILE=table,
        RANK_ID=str(rank),
        RANK_SIZE=str(world_size),
        ASCEND_DEVICE_ID=str(local_rank),
        DEVICE_ID=str(local_rank),
        JOB_ID=job_id,
        NPU_DEVICE_ERROR_FILE=error_file,
        PYTHONUNBUFFERED="1",  # else a rank's output would come in blocks, and the last block of a killed rank never
    )
    if trace is not None:
        environment.update(PROFILING_MODE="true", PROFILING_OPTIONS=json.dumps({"output": os.path.abspath(trace)}))
    return environment
