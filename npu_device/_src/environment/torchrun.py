"""Declare the variables of torchrun."""

from __future__ import annotations

from npu_device._src.environment import forms
from npu_device._src.environment.variable import optional

WORLD_SIZE = optional(
    "WORLD_SIZE",
    forms.COUNT,
    "number of ranks in the job. RANK, WORLD_SIZE and MASTER_ADDR together describe a job.",
)
RANK = optional("RANK", forms.INDEX, "this process's rank.")
LOCAL_RANK = optional("LOCAL_RANK", forms.INDEX, "this process's number among the ranks of its host.")
LOCAL_WORLD_SIZE = optional("LOCAL_WORLD_SIZE", forms.COUNT, "number of ranks on this host.")
MASTER_ADDR = optional(
    "MASTER_ADDR",
    forms.TEXT,
    "address or name of rank 0's host. Ranks that Slurm or MPI started also meet at MASTER_ADDR and MASTER_PORT, if "
    "both are set.",
)
MASTER_PORT = optional(
    "MASTER_PORT",
    forms.PORT,
    "port on rank 0's host where the ranks meet. If torchrun's own store listens there, the ranks compute another one "
    "from it.",
)
TORCHELASTIC_USE_AGENT_STORE = optional(
    "TORCHELASTIC_USE_AGENT_STORE", forms.TEXT, "`True` if torchrun's own store listens at MASTER_PORT."
)
