"""The launchers of clusters: which of them started this process, whether they contradict each other, where ranks meet.

The readers are ``slurm``, ``mpiexec``, ``torchrun`` and ``jax_variables``; ``schemes`` makes a job of what they find.
"""

from __future__ import annotations

from npu_device._src import environment
from npu_device._src.cluster.errors import ClusterError
from npu_device._src.membership import jax_variables, mpi_broadcast, mpiexec, slurm, torchrun
from npu_device._src.membership.launched import Launched, RendezvousAddress

_REMEDY = (
    "What to do: unset the variables that don't belong to this job, or set NPU_DEVICE_LAUNCHER to the launcher that "
    "started the ranks (slurm, mpi, torchrun, jax), or to off if none of them did."
)


def read() -> Launched | None:
    """Return this process's place among the processes that a launcher started; None without a launcher.

    Raises:
        ClusterError: two launchers contradict each other, or a variable is missing.
        ValueError: a variable is malformed.
    """
    wanted = environment.NPU_DEVICE_LAUNCHER.get()
    torch = torchrun.read() if wanted in ("auto", "torchrun") else None
    mpi = mpiexec.read() if wanted in ("auto", "mpi") else None
    step = slurm.read() if wanted in ("auto", "slurm") else None
    # mpiexec may start its daemons with srun, whose variables the ranks inherit. Ranks that srun itself starts may have
    # PMI_RANK and PMI_SIZE (--mpi=pmi2), but no local rank of MPI's; srun's own variables then say more.
    if mpi is not None and step is not None:
        if mpi.size == 1:  # left over from another job, perhaps; this process would train alone
            require_agreement(f"by {mpi.launcher}", mpi.size, mpi.rank, step)
        same = (mpi.size, mpi.rank, mpi.local_rank) == (step.size, step.rank, None)
        mpi, step = (None, step) if same else (mpi, None)
    jax = jax_variables.read() if wanted in ("auto", "jax") else None
    found = mpi or step
    for inner in (jax, torch):
        if inner is not None and found is not None:
            require_agreement(f"by {inner.launcher}", inner.size, inner.rank, found)
        found = inner or found
    if found is not None and found.rank >= found.size:
        raise ClusterError(f"this process is {found}, but ranks count from 0.\n{_REMEDY}")
    return found


def require_agreement(who: str, size: int, rank: int | None, launched: Launched) -> None:
    """Check a description of the job against a launcher, which started either the ranks or, on each host, the process
    that started them.

    Args:
        who: whose description it is, for the message.
        size: its number of ranks.
        rank: its rank of this process; None if it gives none.
        launched: the launcher's place of this process.

    Raises:
        ClusterError: the launcher started more processes, or gave this one another rank.
    """
    if launched.size > size or (launched.size == size and rank not in (None, launched.rank)):
        mine = f"one of {size} ranks" if rank is None else f"rank {rank} of {size}"
        raise ClusterError(f"this process is {mine} {who}, but {launched}.\n{_REMEDY}")


def rendezvous_address(launched: Launched) -> RendezvousAddress:
    """Return where the ranks meet. Waits for all ranks where only MPI can tell.

    Raises:
        ClusterError: nothing says where.
    """
    if launched.port is not None:
        return RendezvousAddress((launched.address,), launched.port)
    address, port = torchrun.rendezvous_address() or (launched.address, None)
    if launched.on_one_host:
        if port is None and not launched.job:
            raise ClusterError(
                f"{launched.launcher} started the {launched.size} ranks on this host, and nothing tells them at which "
                "port they meet: from here, the process that started them can't be seen.\n"
                "What to do: set MASTER_ADDR=127.0.0.1 and MASTER_PORT to a free port, the same for every rank."
            )
        return RendezvousAddress(("127.0.0.1",), port)
    return RendezvousAddress((address,), port) if address else mpi_broadcast.agree(launched)
