"""Declare the variables of MPI's launchers."""

from __future__ import annotations

from npu_device._src.environment import forms
from npu_device._src.environment.variable import Variable, optional

_RANK, _SIZE = "rank of this process", "number of ranks in the job"
_LOCAL_RANK, _LOCAL_SIZE = "number of this process among the ranks of its host", "number of ranks on this host"


def _index(name: str, meaning: str) -> Variable[int | None]:
    return optional(name, forms.INDEX, f"{meaning}.")


def _count(name: str, meaning: str) -> Variable[int | None]:
    return optional(name, forms.COUNT, f"{meaning}.")


OMPI_COMM_WORLD_SIZE = _count("OMPI_COMM_WORLD_SIZE", _SIZE)
OMPI_COMM_WORLD_RANK = _index("OMPI_COMM_WORLD_RANK", _RANK)
OMPI_COMM_WORLD_LOCAL_RANK = _index("OMPI_COMM_WORLD_LOCAL_RANK", _LOCAL_RANK)
OMPI_COMM_WORLD_LOCAL_SIZE = _count("OMPI_COMM_WORLD_LOCAL_SIZE", _LOCAL_SIZE)
PMIX_NAMESPACE = optional("PMIX_NAMESPACE", forms.TEXT, "name of an Open MPI job.")
PMI_SIZE = _count("PMI_SIZE", f"{_SIZE} (MPICH, Intel MPI, PALS)")
PMI_RANK = _index("PMI_RANK", f"{_RANK} (MPICH, Intel MPI)")
MPI_LOCALRANKID = _index("MPI_LOCALRANKID", f"{_LOCAL_RANK} (MPICH, Intel MPI)")
MPI_LOCALNRANKS = _count("MPI_LOCALNRANKS", f"{_LOCAL_SIZE} (MPICH, Intel MPI)")
PALS_RANKID = _index("PALS_RANKID", f"{_RANK} (PALS)")
PALS_LOCAL_RANKID = _index("PALS_LOCAL_RANKID", f"{_LOCAL_RANK} (PALS)")
PMI_LOCAL_SIZE = _count("PMI_LOCAL_SIZE", f"{_LOCAL_SIZE} (PALS)")
PALS_APID = optional("PALS_APID", forms.TEXT, "name of a PALS job.")
