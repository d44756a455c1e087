"""Declare the variables of Slurm's job steps."""

from __future__ import annotations

from npu_device._src.environment import forms
from npu_device._src.environment.variable import optional

SLURM_STEP_NUM_TASKS = optional(
    "SLURM_STEP_NUM_TASKS",
    forms.COUNT,
    "number of ranks in the job. Only `srun` sets it: a batch script is not a rank.",
)
SLURM_PROCID = optional("SLURM_PROCID", forms.INDEX, "rank of this process.")
SLURM_LOCALID = optional("SLURM_LOCALID", forms.INDEX, "number of this process among the ranks of its host.")
SLURM_STEP_NODELIST = optional("SLURM_STEP_NODELIST", forms.TEXT, "nodes of the step. The ranks meet on the first one.")
SLURMD_NODENAME = optional("SLURMD_NODENAME", forms.TEXT, "name of this node.")
SLURM_JOB_ID = optional("SLURM_JOB_ID", forms.TEXT, "number of the job; the port where the ranks meet follows from it.")
SLURM_STEP_ID = optional("SLURM_STEP_ID", forms.TEXT, "number of the step in the job; as SLURM_JOB_ID.")
