"""MPI's launchers: ``mpiexec`` of Open MPI, MPICH, Intel MPI and PALS. They number the ranks, and give no address.

Sources: Open MPI FAQ, environment variables of a rank; Intel MPI developer reference; mpiexec(1) of HPE Cray PALS.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple, Optional

from npu_device._src import environment
from npu_device._src.environment import Variable
from npu_device._src.membership.launched import Launched

_PARENT, _START_TIME = 1, 19  # in /proc/PID/stat, behind the program's name


class _Kind(NamedTuple):
    launcher: str
    rank: Variable[Optional[int]]
    size: Variable[Optional[int]]
    local_rank: Variable[Optional[int]]
    local_size: Variable[Optional[int]]
    job: Variable[Optional[str]] | None


_KINDS = (
    _Kind(
        "Open MPI",
        environment.OMPI_COMM_WORLD_RANK,
        environment.OMPI_COMM_WORLD_SIZE,
        environment.OMPI_COMM_WORLD_LOCAL_RANK,
        environment.OMPI_COMM_WORLD_LOCAL_SIZE,
        environment.PMIX_NAMESPACE,
    ),
    # PALS sets PMI_RANK too, and so comes first.
    _Kind(
        "PALS",
        environment.PALS_RANKID,
        environment.PMI_SIZE,
        environment.PALS_LOCAL_RANKID,
        environment.PMI_LOCAL_SIZE,
        environment.PALS_APID,
    ),
    _Kind(
        "MPICH",
        environment.PMI_RANK,
        environment.PMI_SIZE,
        environment.MPI_LOCALRANKID,
        environment.MPI_LOCALNRANKS,
        None,
    ),
)

LAUNCHERS = tuple(kind.launcher for kind in _KINDS)


def read() -> Launched | None:
    """Return this process's place; None if no ``mpiexec`` started it.

    Raises:
        ValueError: a variable is malformed.
    """
    for kind in _KINDS:
        if kind.rank.is_set() and kind.size.is_set():
            rank, size, local_size = kind.rank.get(), kind.size.get(), kind.local_size.get()
            assert rank is not None and size is not None
            return Launched(
                launcher=kind.launcher,
                variable=kind.rank.name,
                size=size,
                rank=rank,
                local_rank=kind.local_rank.get(),
                on_one_host=local_size == size,
                job=(kind.job and kind.job.get()) or (_starter(kind.local_rank) if local_size == size > 1 else ""),
            )
    return None


def _starter(variable: Variable[int | None]) -> str:
    """Return the process that started the ranks of this host: the nearest ancestor that isn't a rank itself, as a shell
    between the two would be.

    Args:
        variable: a variable that all ranks have.

    Returns:
        The process's number and start time; "" if it is out of sight, as from a container.
    """
    prefix, pid = f"{variable.name}=".encode(), os.getppid()
    while pid:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            break
        try:
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:  # another user's process, and so no rank
            variables = []
        if not any(text.startswith(prefix) for text in variables):
            return f"{pid}-{fields[_START_TIME]}"
        pid = int(fields[_PARENT])
    return ""
