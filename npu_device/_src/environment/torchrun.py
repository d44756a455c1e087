"""Declare the variables of torchrun."""

from __future__ import annotations

from npu_device._src.environment import forms
from npu_device._src.environment.variable import optional

WORLD_SIZE = optional(
    "WORLD_SIZE",
    forms.COUNT,
    "number of ranks in the job. RANK, WORLD_SIZE and MASTER_ADDR together describe a job.",
)
RANK = optional("RANK", forms.INDEX, "rank of this process.")
LOCAL_RANK = optional("LOCAL_RANK", forms.INDEX, "number of this process among the ranks of its host.")
LOCAL_WORLD_SIZE = optional("LOCAL_WORLD_SIZE", forms.COUNT, "number of ranks on this host.")
MASTER_ADDR = optional(
    "MASTER_ADDR",
    forms.TEXT,
    "address or name of the host of rank 0. Ranks that Slurm or MPI started also meet at MASTER_ADDR and MASTER_PORT, "
    "if both are set.",
)
MASTER_PORT = optional(
    "MASTER_PORT",
    forms.PORT,
    "port on the host of rank 0 where the ranks meet. If the store of torchrun listens there, the ranks compute a "
    "different one from it.",
)
TORCHELASTIC_USE_AGENT_STORE = optional(
    "TORCHELASTIC_USE_AGENT_STORE", forms.TEXT, "`True` if the store of torchrun listens at MASTER_PORT."
)
