"""Tell all ranks of an MPI job where rank 0 is, through mpi4py: MPI's launchers give no address."""

from __future__ import annotations

import importlib
import secrets
import socket
from typing import Any

from npu_device._src import environment
from npu_device._src.cluster.errors import ClusterError
from npu_device._src.cluster.ports import ReservedPort, addresses_of_this_host
from npu_device._src.membership.interfaces import announced_address
from npu_device._src.membership.launched import Launched, RendezvousAddress


def agree(launched: Launched) -> RendezvousAddress:
    """Return rank 0's choice. Every rank waits here for all the others.

    Raises:
        ClusterError: mpi4py isn't there, or its MPI is not the launcher's.
    """
    remedy = (
        "What to do: install mpi4py for this MPI on every host (pip install mpi4py), or set MASTER_ADDR to the address "
        "of rank 0's host and MASTER_PORT to a free port there, the same for every rank."
    )
    what = f"{launched.launcher} started the {launched.size} ranks on several hosts, and tells no rank where rank 0 is"
    try:
        mpi: Any = importlib.import_module("mpi4py.MPI")
    except (ImportError, RuntimeError) as error:  # RuntimeError: it finds no library of MPI
        raise ClusterError(f"{what}. mpi4py could ask MPI, but can't be imported: {error}.\n{remedy}") from error
    world = mpi.COMM_WORLD
    if (world.Get_size(), world.Get_rank()) != (launched.size, launched.rank):
        raise ClusterError(
            f"{what}. mpi4py uses another MPI than the launcher's: there, {launched} is rank {world.Get_rank()} of "
            f"{world.Get_size()}.\n{remedy}"
        )
    return RendezvousAddress(*world.bcast(tuple(_choose()) if launched.rank == 0 else None))


def _choose() -> RendezvousAddress:
    port = ReservedPort(environment.NPU_DEVICE_PORT_RANGE.get())
    port.leave_to_tensorflow()
    given = announced_address()
    hosts = [given] if given else [socket.gethostname(), *addresses_of_this_host()]
    return RendezvousAddress(tuple(hosts), port.number, secrets.token_hex(32).encode())
