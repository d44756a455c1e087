"""Slurm: the tasks of a job step, which ``srun`` starts. A batch script and an allocation's shell are no tasks.

Source: srun(1), output environment variables.
"""

from __future__ import annotations

import re

from npu_device._src import environment
from npu_device._src.membership.launched import Launched


def read() -> Launched | None:
    """Return this process's place in its job step; None outside of a step.

    Raises:
        ValueError: a variable is malformed.
    """
    nodes = environment.SLURM_STEP_NODELIST.get()
    # sbatch and salloc set SLURM_PROCID and SLURM_NTASKS too, but the step's own variables only srun.
    size, rank = environment.SLURM_STEP_NUM_TASKS.get(), environment.SLURM_PROCID.get()
    if size is None or rank is None or nodes is None:
        return None
    first = first_node(nodes)
    return Launched(
        launcher="Slurm",
        variable=environment.SLURM_PROCID.name,
        size=size,
        rank=rank,
        local_rank=environment.SLURM_LOCALID.get(),
        on_one_host=first == nodes,
        node=environment.SLURMD_NODENAME.get() or "",
        job=f"{environment.SLURM_JOB_ID.get()}.{environment.SLURM_STEP_ID.get()}",
        address=first,  # where Slurm puts task 0, unless a host file orders the tasks
    )


def first_node(nodes: str) -> str:
    """Return the first name of a list of nodes.

    Examples:
        >>> first_node("rack[2-3]n[007,9-11]-ib,login1")
        'rack2n007-ib'
    """
    first = re.match(r"(\[[^\]]*\]|[^,\[])*", nodes)
    assert first is not None
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first.group())
