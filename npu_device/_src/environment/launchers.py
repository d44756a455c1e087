"""Declare the variables of the programs that start the ranks of a job: Slurm, MPI and torchrun."""

from __future__ import annotations

from npu_device._src.environment import forms
from npu_device._src.environment.variable import Variable

_RANK, _SIZE = "this process's rank", "number of ranks in the job"
_LOCAL_RANK, _LOCAL_SIZE = "this process's number among the ranks of its host", "number of ranks on this host"


def _number(name: str, meaning: str, origin: str, low: int = 0) -> Variable[int | None]:
    return Variable(name, forms.integer(low), None, "", f"{meaning}.", origin)


def _text(name: str, meaning: str, origin: str) -> Variable[str | None]:
    return Variable(name, forms.TEXT, None, "", f"{meaning}.", origin)


SLURM_STEP_NUM_TASKS = _number(
    "SLURM_STEP_NUM_TASKS", f"{_SIZE}. Only `srun` sets it: a batch script is not a rank", "Slurm", 1
)
SLURM_PROCID = _number("SLURM_PROCID", _RANK, "Slurm")
SLURM_LOCALID = _number("SLURM_LOCALID", _LOCAL_RANK, "Slurm")
SLURM_STEP_NODELIST = _text("SLURM_STEP_NODELIST", "the step's nodes; the ranks meet on the first", "Slurm")
SLURMD_NODENAME = _text("SLURMD_NODENAME", "name of this node", "Slurm")
SLURM_JOB_ID = _text("SLURM_JOB_ID", "number of the job; the port where the ranks meet follows from it", "Slurm")
SLURM_STEP_ID = _text("SLURM_STEP_ID", "number of the step in the job; as SLURM_JOB_ID", "Slurm")

OMPI_COMM_WORLD_SIZE = _number("OMPI_COMM_WORLD_SIZE", _SIZE, "MPI", 1)
OMPI_COMM_WORLD_RANK = _number("OMPI_COMM_WORLD_RANK", _RANK, "MPI")
OMPI_COMM_WORLD_LOCAL_RANK = _number("OMPI_COMM_WORLD_LOCAL_RANK", _LOCAL_RANK, "MPI")
OMPI_COMM_WORLD_LOCAL_SIZE = _number("OMPI_COMM_WORLD_LOCAL_SIZE", _LOCAL_SIZE, "MPI", 1)
PMIX_NAMESPACE = _text("PMIX_NAMESPACE", "name of an Open MPI job", "MPI")
PMI_SIZE = _number("PMI_SIZE", f"{_SIZE} (MPICH, Intel MPI, PALS)", "MPI", 1)
PMI_RANK = _number("PMI_RANK", f"{_RANK} (MPICH, Intel MPI)", "MPI")
MPI_LOCALRANKID = _number("MPI_LOCALRANKID", f"{_LOCAL_RANK} (MPICH, Intel MPI)", "MPI")
MPI_LOCALNRANKS = _number("MPI_LOCALNRANKS", f"{_LOCAL_SIZE} (MPICH, Intel MPI)", "MPI", 1)
PALS_RANKID = _number("PALS_RANKID", f"{_RANK} (PALS)", "MPI")
PALS_LOCAL_RANKID = _number("PALS_LOCAL_RANKID", f"{_LOCAL_RANK} (PALS)", "MPI")
PMI_LOCAL_SIZE = _number("PMI_LOCAL_SIZE", f"{_LOCAL_SIZE} (PALS)", "MPI", 1)
PALS_APID = _text("PALS_APID", "name of a PALS job", "MPI")

WORLD_SIZE = _number("WORLD_SIZE", f"{_SIZE}. RANK, WORLD_SIZE and MASTER_ADDR together describe a job", "torchrun", 1)
RANK = _number("RANK", _RANK, "torchrun")
LOCAL_RANK = _number("LOCAL_RANK", _LOCAL_RANK, "torchrun")
LOCAL_WORLD_SIZE = _number("LOCAL_WORLD_SIZE", _LOCAL_SIZE, "torchrun", 1)
MASTER_ADDR = _text(
    "MASTER_ADDR",
    "address or name of rank 0's host. Ranks that Slurm or MPI started also meet at MASTER_ADDR and MASTER_PORT, if "
    "both are set",
    "torchrun",
)
MASTER_PORT: Variable[int | None] = Variable(
    "MASTER_PORT",
    forms.integer(1, 65535),
    None,
    "",
    "port on rank 0's host where the ranks meet. If torchrun's own store listens there, the ranks compute another one "
    "from it.",
    "torchrun",
)
TORCHELASTIC_USE_AGENT_STORE = _text(
    "TORCHELASTIC_USE_AGENT_STORE", "`True` if torchrun's own store listens at MASTER_PORT", "torchrun"
)
