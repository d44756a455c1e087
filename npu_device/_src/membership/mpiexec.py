"""``mpiexec`` of Open MPI, MPICH, Intel MPI and PALS, which number the ranks; mpi4py tells where rank 0 is.

Sources: Open MPI FAQ; Intel MPI developer reference; mpiexec(1) of HPE Cray PALS.
"""

from __future__ import annotations

import importlib
import secrets
import socket
from pathlib import Path
from typing import Any, NamedTuple, Optional

from npu_device._src import environment
from npu_device._src.cluster.ancestors import ancestors
from npu_device._src.cluster.errors import ClusterError
from npu_device._src.cluster.ports import ReservedPort, addresses_of_this_host
from npu_device._src.environment import Variable
from npu_device._src.membership.interfaces import announced_address
from npu_device._src.membership.launched import Launched, RendezvousAddress


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

_reserved: list[ReservedPort] = []


def read() -> Launched | None:
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
    """Return the process that started the ranks of this host: the nearest ancestor that isn't a rank itself."""
    prefix = f"{variable.name}=".encode()
    for pid, started in ancestors():
        try:
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:  # another user's process, and so no rank
            variables = []
        if not any(text.startswith(prefix) for text in variables):
            return f"{pid}-{started}"
    return ""


def agree(launched: Launched) -> RendezvousAddress:
    """Return the choice of rank 0. Every rank waits here for all the others."""
    remedy = (
        "What to do: install mpi4py for this MPI on every host (pip install mpi4py), or set MASTER_ADDR to the address "
        "of the host of rank 0 and MASTER_PORT to a free port there, the same for every rank."
    )
    what = f"{launched.launcher} started the {launched.size} ranks on several hosts, and tells no rank where rank 0 is"
    try:
        mpi: Any = importlib.import_module("mpi4py.MPI")
    except (ImportError, RuntimeError) as error:  # RuntimeError: it finds no library of MPI
        raise ClusterError(f"{what}. mpi4py could ask MPI, but can't be imported: {error}.\n{remedy}") from error
    world = mpi.COMM_WORLD
    if (world.Get_size(), world.Get_rank()) != (launched.size, launched.rank):
        raise ClusterError(
            f"{what}. mpi4py and the launcher use different MPI libraries: in mpi4py, {launched} is rank "
            f"{world.Get_rank()} of {world.Get_size()}.\n{remedy}"
        )
    return RendezvousAddress(*world.bcast(tuple(_choose()) if launched.rank == 0 else None))


def _choose() -> RendezvousAddress:
    port = ReservedPort(environment.NPU_DEVICE_PORT_RANGE.get())
    port.leave_to_server()
    _reserved.append(port)  # until the hub, which this rank starts, has it, and longer
    given = announced_address()
    hosts = [given] if given else [socket.gethostname(), *addresses_of_this_host()]
    return RendezvousAddress(tuple(hosts), port.number, secrets.token_hex(32).encode())
