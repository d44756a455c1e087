"""The launchers of clusters: which of them started this process, whether they contradict each other, where ranks meet.

Sources: srun(1); PyTorch documentation, "torchrun", which Kubeflow follows, too; Kubeflow Trainer 2.3, jax plugin; Open
MPI FAQ; Intel MPI developer reference; mpiexec(1) of HPE Cray PALS.
"""

from __future__ import annotations

import importlib
import re
import secrets
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable

from npu_device._src import environment
from npu_device._src.cluster.ports import ReservedPort, addresses_of_this_host
from npu_device._src.cluster.rank_errors import ClusterError
from npu_device._src.cluster.roster import ancestors
from npu_device._src.environment import Variable
from npu_device._src.membership.interfaces import announced_address


@dataclass(frozen=True)
class Launched:
    """The place of this process in the job, as the variables of the launcher give it."""

    launcher: str
    rank_variable: str  # name of the variable that holds the rank, for messages
    size: int  # number of ranks, 1 or more
    rank: int
    local_rank: int | None = None  # position among the ranks of its host; None if unknown
    on_one_host: bool = False  # True if all ranks are known to be on this host
    node_name: str = ""  # name that the launcher gives this host; "" if it has none
    job_name: str = ""  # text that only the ranks of this job have; "" if there is none
    address: str = ""  # address or name of the host of rank 0; "" if unknown
    port: int | None = None  # port at which the ranks meet there; None if the launcher names none

    def __str__(self) -> str:
        return (
            f"rank {self.rank} of {self.size} ({self.launcher}: {self.rank_variable}={self.rank})"
        )


_REMEDY = (
    "What to do: unset the variables that don't belong to this job, or set NPU_DEVICE_LAUNCHER to the launcher that "
    "started the ranks (slurm, mpi, torchrun, jax), or to off if none of them did."
)


def read() -> Launched | None:
    """Return the place of this process among those that a launcher started; None without a launcher."""
    torchrun = _read_if_wanted("torchrun", _torchrun)
    launched = _mpi_or_slurm(_read_if_wanted("mpi", read_mpi), _read_if_wanted("slurm", _slurm))
    # Launchers may be nested: srun may start a torchrun on each node, which then knows the ranks.
    for inner in (_read_if_wanted("jax", _jax), torchrun):
        if inner is not None and launched is not None:
            require_agreement(f"by {inner.launcher}", inner.size, inner.rank, launched)
        # The innermost launcher describes the ranks.
        launched = inner or launched
    if launched is not None and launched.rank >= launched.size:
        raise ClusterError(f"this process is {launched}, but ranks count from 0.\n{_REMEDY}")
    return launched


def _read_if_wanted(
    launcher: str, read_variables: Callable[[], Launched | None]
) -> Launched | None:
    if environment.NPU_DEVICE_LAUNCHER.get() not in ("auto", launcher):
        return None
    return read_variables()


def _mpi_or_slurm(mpi: Launched | None, slurm: Launched | None) -> Launched | None:
    """Return the one of the two that started the ranks."""
    if mpi is None or slurm is None:
        return mpi or slurm
    # A size of 1 may be left over from another job, and this process would train alone.
    if mpi.size == 1:
        require_agreement(f"by {mpi.launcher}", mpi.size, mpi.rank, slurm)
    # mpiexec may start its daemons with srun, whose variables the ranks inherit. Ranks that srun itself starts may have
    # PMI_RANK and PMI_SIZE (--mpi=pmi2), but no local rank of MPI's; srun's own variables then say more.
    is_same_rank = (mpi.size, mpi.rank) == (slurm.size, slurm.rank)
    if is_same_rank and mpi.local_rank is None:
        return slurm
    return mpi


def require_agreement(source: str, size: int, rank: int | None, launched: Launched) -> None:
    """Check a description of the job against a launcher, which started the ranks, or on each host their parent."""
    has_other_rank = launched.size == size and rank not in (None, launched.rank)
    if launched.size > size or has_other_rank:
        position = f"rank {rank} of {size}"
        if rank is None:
            position = f"one of {size} ranks"
        raise ClusterError(f"this process is {position} {source}, but {launched}.\n{_REMEDY}")


def rendezvous_address(launched: Launched) -> tuple[tuple[str, ...], int | None, bytes]:
    """Return where the ranks meet: hosts to try, a port unless the ranks compute it, a secret for a job without one.

    Waits for all ranks where only MPI can tell.
    """
    if launched.port is not None:
        return (launched.address,), launched.port, b""
    address = environment.MASTER_ADDR.get()
    port = environment.MASTER_PORT.get()
    # The address or the port alone isn't enough to meet.
    if address is None or port is None:
        address = launched.address
        port = None
    elif environment.TORCHELASTIC_USE_AGENT_STORE.get() == "True":
        # torchrun's own store listens at the port, so that ranks can't meet there.
        port = None
    if launched.on_one_host:
        if port is None and not launched.job_name:
            raise ClusterError(
                f"{launched.launcher} started the {launched.size} ranks on this host, and nothing tells them at which "
                "port they meet: from here, the process that started them can't be seen.\n"
                "What to do: set MASTER_ADDR=127.0.0.1 and MASTER_PORT to a free port, the same for every rank."
            )
        return ("127.0.0.1",), port, b""
    if not address:
        return _ask_mpi(launched)
    return (address,), port, b""


def _slurm() -> Launched | None:
    # sbatch and salloc set SLURM_PROCID and SLURM_NTASKS too, but the step's own variables only srun.
    nodes = environment.SLURM_STEP_NODELIST.get()
    size = environment.SLURM_STEP_NUM_TASKS.get()
    rank = environment.SLURM_PROCID.get()
    if size is None or rank is None or nodes is None:
        return None
    # Slurm shortens lists of hosts. The first name is wanted: rack2n007-ib of rack[2-3]n[007,9-11]-ib,login1.
    pattern = re.findall(r"(?:\[[^\]]*\]|[^,\[])*", nodes)[0]
    node_of_task_0 = re.sub(r"\[(\w+)[^\]]*\]", r"\1", pattern)
    job_id = environment.SLURM_JOB_ID.get()
    step_id = environment.SLURM_STEP_ID.get()
    return Launched(
        launcher="Slurm",
        rank_variable=environment.SLURM_PROCID.name,
        size=size,
        rank=rank,
        local_rank=environment.SLURM_LOCALID.get(),
        # A list without brackets or commas is one node.
        on_one_host=node_of_task_0 == nodes,
        node_name=environment.SLURMD_NODENAME.get() or "",
        job_name=f"{job_id}.{step_id}",
        # Slurm puts task 0 on the first node, unless a host file orders the tasks.
        address=node_of_task_0,
    )


def _torchrun() -> Launched | None:
    if not environment.MASTER_ADDR.is_set() or not environment.WORLD_SIZE.is_set():
        return None
    rank = environment.RANK.get()
    size = environment.WORLD_SIZE.get()
    if rank is None or size is None:
        return None
    if size > 1 and not environment.MASTER_PORT.is_set():
        raise ClusterError(
            f"MASTER_PORT is missing or empty, while RANK ({rank}), WORLD_SIZE ({size}) and MASTER_ADDR are set.\n"
            "What to do: set MASTER_PORT to a free port on the host of rank 0, the same on every rank. To train on a "
            "single device, set NPU_DEVICE_LAUNCHER=off."
        )
    return Launched(
        launcher="torchrun",
        rank_variable=environment.RANK.name,
        size=size,
        rank=rank,
        local_rank=environment.LOCAL_RANK.get(),
        on_one_host=environment.LOCAL_WORLD_SIZE.get() == size,
        job_name=f"{environment.MASTER_ADDR.get()}:{environment.MASTER_PORT.get()}",
    )


def _jax() -> Launched | None:
    size = environment.JAX_NUM_PROCESSES.get()
    rank = environment.JAX_PROCESS_ID.get()
    if size is None or rank is None:
        return None
    coordinator = environment.JAX_COORDINATOR_ADDRESS.get()
    if size > 1 and coordinator is None:
        raise ClusterError(
            f"JAX_COORDINATOR_ADDRESS is missing or empty, while JAX_PROCESS_ID ({rank}) and JAX_NUM_PROCESSES "
            f"({size}) are set.\nWhat to do: set it to host:port on the host of rank 0, the same on every rank. To "
            "train on a single device, set NPU_DEVICE_LAUNCHER=off."
        )
    address, port = coordinator or ("", None)
    return Launched(
        launcher="JAX",
        rank_variable=environment.JAX_PROCESS_ID.name,
        size=size,
        rank=rank,
        job_name=f"{address}:{port}",
        address=address,
        port=port,
    )


_STARTED_BY_NPURUN = "start the script with npurun on every node, without options: npurun train.py"
_OR_NPURUN = "or let npurun start the ranks: npurun -n N train.py"
_SEVERAL = "the job has several processes"
_SEVERAL_PROCESSES: tuple[tuple[Variable[int | None], str, str], ...] = (
    (
        environment.PET_NNODES,
        "Kubeflow's torch runtime has started one process per node",
        _STARTED_BY_NPURUN,
    ),
    (
        environment.SKYPILOT_NUM_NODES,
        "SkyPilot has started one process per node",
        _STARTED_BY_NPURUN,
    ),
    (
        environment.WORLD_SIZE,
        _SEVERAL,
        f"set RANK, MASTER_ADDR and MASTER_PORT, too, as torchrun does, {_OR_NPURUN}",
    ),
    (
        environment.JAX_NUM_PROCESSES,
        _SEVERAL,
        f"set JAX_PROCESS_ID and JAX_COORDINATOR_ADDRESS, too, {_OR_NPURUN}",
    ),
    (
        environment.HOROVOD_SIZE,
        "horovodrun has started several processes",
        "use npurun instead: npurun -n N train.py",
    ),
    (
        environment.FLUX_JOB_SIZE,
        "Flux has started several tasks",
        "start one task per node, and in it npurun -n N --nnodes M --node-rank R --master-addr ADDR train.py",
    ),
)


def require_single() -> None:
    """Refuse to train alone in one of several processes, where nothing gives this one a rank."""
    # The user has said that this process is to train alone.
    if environment.NPU_DEVICE_LAUNCHER.get() == "off":
        return
    for variable, meaning, remedy in _SEVERAL_PROCESSES:
        count = variable.get()
        if count is not None and count > 1:
            raise ClusterError(
                f"{variable.name} is {count}: {meaning}, but nothing gives this one a rank. It would train a model of "
                f"its own.\nWhat to do: {remedy}. For a training on this process alone, set NPU_DEVICE_LAUNCHER=off."
            )


# The variables of rank, size, local rank, local size, and name of the job.
_VARIABLES_OF_MPI = (
    (
        "Open MPI",
        environment.OMPI_COMM_WORLD_RANK,
        environment.OMPI_COMM_WORLD_SIZE,
        environment.OMPI_COMM_WORLD_LOCAL_RANK,
        environment.OMPI_COMM_WORLD_LOCAL_SIZE,
        environment.PMIX_NAMESPACE,
    ),
    # PALS sets PMI_RANK too, and so comes first.
    (
        "PALS",
        environment.PALS_RANKID,
        environment.PMI_SIZE,
        environment.PALS_LOCAL_RANKID,
        environment.PMI_LOCAL_SIZE,
        environment.PALS_APID,
    ),
    (
        "MPICH",
        environment.PMI_RANK,
        environment.PMI_SIZE,
        environment.MPI_LOCALRANKID,
        environment.MPI_LOCALNRANKS,
        None,
    ),
)

MPI_LAUNCHERS = tuple(launcher for launcher, *_ in _VARIABLES_OF_MPI)

_reserved: list[ReservedPort] = []


def read_mpi() -> Launched | None:
    """Return the place of this process among those that an ``mpiexec`` started; None without one."""
    for (
        launcher,
        rank_variable,
        size_variable,
        local_rank,
        local_size,
        job_variable,
    ) in _VARIABLES_OF_MPI:
        rank = rank_variable.get()
        size = size_variable.get()
        # Both have to be set, since a variable of the size alone is set for other processes, too.
        if rank is None or size is None:
            continue
        on_one_host = local_size.get() == size
        job = ""
        if job_variable is not None:
            job = job_variable.get() or ""
        # The ranks of one host have the same starter, whose process id names the job.
        if not job and on_one_host and size > 1:
            job = _starter(local_rank)
        return Launched(
            launcher=launcher,
            rank_variable=rank_variable.name,
            size=size,
            rank=rank,
            local_rank=local_rank.get(),
            on_one_host=on_one_host,
            job_name=job,
        )
    return None


def _starter(variable: Variable[int | None]) -> str:
    """Return the process that started the ranks of this host: the nearest ancestor that isn't a rank itself."""
    prefix = f"{variable.name}=".encode()
    for pid, started in ancestors():
        try:
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            # Another user's process can't be read, and is no rank.
            variables = []
        if not any(text.startswith(prefix) for text in variables):
            return f"{pid}-{started}"
    return ""


def _ask_mpi(launched: Launched) -> tuple[tuple[str, ...], int, bytes]:
    """Return the choice of rank 0. Every rank waits here for all the others."""
    remedy = (
        "What to do: install mpi4py for this MPI on every host (pip install mpi4py), or set MASTER_ADDR to the address "
        "of the host of rank 0 and MASTER_PORT to a free port there, the same for every rank."
    )
    problem = (
        f"{launched.launcher} started the {launched.size} ranks on several hosts, "
        "and tells no rank where rank 0 is"
    )
    try:
        mpi = importlib.import_module("mpi4py.MPI")
    except (ImportError, RuntimeError) as error:
        # mpi4py raises a RuntimeError if it finds no library of MPI.
        raise ClusterError(
            f"{problem}. mpi4py could ask MPI, but can't be imported: {error}.\n{remedy}"
        ) from error
    world = mpi.COMM_WORLD
    size = world.Get_size()
    rank = world.Get_rank()
    if (size, rank) != (launched.size, launched.rank):
        raise ClusterError(
            f"{problem}. mpi4py and the launcher use different MPI libraries: in mpi4py, {launched} is rank "
            f"{rank} of {size}.\n{remedy}"
        )
    choice: Any = None
    if launched.rank == 0:
        port = ReservedPort(environment.NPU_DEVICE_PORT_RANGE.get())
        # Rank 0 itself must not listen there: the hub does.
        port.leave_to_server()
        # The socket stays open for as long as the process lives: if it closed without this reference, another process
        # could get the port before the hub binds it.
        _reserved.append(port)
        hosts = [socket.gethostname(), *addresses_of_this_host()]
        announced = announced_address()
        if announced:
            hosts = [announced]
        choice = tuple(hosts), port.number, secrets.token_hex(32).encode()
    hosts, port_number, secret = world.bcast(choice)
    return hosts, port_number, secret
