"""The engines between hosts, as one list, and the choice of one of them for the job.

The first engine that can be used is taken. ``NPU_DEVICE_BACKEND`` names one instead, and then no other is taken. Within
a host, ranks share memory underneath each of them, unless NCCL takes the tensor (see ``engines.Engines``).
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Callable, NamedTuple

from npu_device._src import environment
from npu_device._src.cluster.rank_errors import ClusterError
from npu_device._src.collectives.engines.host.mpi_messages import open_world
from npu_device._src.collectives.gpu_choice import why_no_nccl
from npu_device._src.collectives.hosts_of_job import JobHosts
from npu_device._src.collectives.job import Job
from npu_device._src.membership import launchers

_log = logging.getLogger("npu_device")

_IN_TIME = (
    "call `npu.open()` right after the imports, before the first tensor, variable, model, dataset or "
    "tf.config.list_logical_devices() of the script"
)


class Candidate(NamedTuple):
    """One engine between hosts.

    Attributes:
        problems: called on every rank; prepares the engine, and returns why the job can't use it, in one or more lines,
            the same on all ranks. "" if it can.
    """

    name: str  # its name in ``NPU_DEVICE_BACKEND``
    title: str
    problems: Callable[[Job, JobHosts], str]
    remedy: str  # what to do if it has been named and can't be used


def _problems_of_nccl(job: Job, hosts: JobHosts) -> str:
    problem = why_no_nccl(hosts.devices, job.cluster.hosts, environment.NPU_DEVICE_BACKEND.get())
    if problem:
        return f"  {problem}"
    if hosts.late:
        raise ClusterError(
            "NCCL needs TensorFlow's server, which can't be started:\n"
            f"{_late(job, hosts)}\nWhat to do: {_IN_TIME}."
        )
    return ""


def _problems_of_mpi(job: Job, _: JobHosts) -> str:
    problems = open_world(job, environment.NPU_DEVICE_BACKEND.get() == "mpi")
    lines = job.cluster.lines({rank: problem for rank, problem in enumerate(problems) if problem})
    return "\n".join(lines)


def _problems_of_server(job: Job, hosts: JobHosts) -> str:
    # Ranks of one host don't need the network.
    if hosts.share_memory or not hosts.late:
        return ""
    return _late(job, hosts)


def _late(job: Job, hosts: JobHosts) -> str:
    names = ", ".join(map(job.cluster.name_of, hosts.late))
    return (
        f"  TensorFlow has been used before npu.open() on {names}: its devices exist, and its server must be started "
        "before that."
    )


CANDIDATES = (
    Candidate(
        "nccl",
        "NCCL",
        _problems_of_nccl,
        "What to do: start one rank per GPU, with a TensorFlow that is built for CUDA; or unset NPU_DEVICE_BACKEND.",
    ),
    Candidate(
        "mpi",
        "MPI",
        _problems_of_mpi,
        "What to do: install mpi4py on every host (pip install mpi4py), start all ranks with one mpiexec, and let "
        "mpi4py find its libmpi.so (LD_LIBRARY_PATH, or MPI4PY_LIBMPI=/path/to/libmpi.so); or unset "
        "NPU_DEVICE_BACKEND.",
    ),
    Candidate(
        "tensorflow",
        "TensorFlow's server",
        _problems_of_server,
        f"What to do: {_IN_TIME}; or set NPU_DEVICE_BACKEND=tcp, which can be opened at any time.",
    ),
    Candidate("tcp", "TCP", lambda job, hosts: "", ""),
)
"""All engines, in the order in which they are tried:

1. NCCL through TensorFlow, where each rank has a GPU of its own; tensors that it can't reduce take TensorFlow's ring.
2. The site's MPI, where one ``mpiexec`` started all ranks and mpi4py is installed.
3. TensorFlow's collectives, whose ring over gRPC is there with every TensorFlow.
4. TCP, the package's own, is there to be named. Unnamed, it is taken only if ``npu.open()`` comes too late for 3.
"""


def choose_engine(job: Job, hosts: JobHosts) -> JobHosts:
    """Choose the engine between hosts, and return what the ranks know of each other, with it. Every rank calls this."""
    wanted = environment.NPU_DEVICE_BACKEND.get()
    named = [engine for engine in CANDIDATES if engine.name == wanted]
    # Ranks of one host share memory, except between GPUs: only NCCL matters there. MPI is left out, as it takes time to
    # start.
    listed = named or [
        engine for engine in CANDIDATES if engine.name != "mpi" or not hosts.share_memory
    ]
    against = {}  # the problems of engines, by their names
    for engine in listed:
        problems = engine.problems(job, hosts)
        if not problems:
            # The loop always ends here, since TCP has no problems.
            break
        if named:
            raise ClusterError(
                f"NPU_DEVICE_BACKEND is {wanted}, but {engine.title} can't be used:\n{problems}\n{engine.remedy}"
            )
        against[engine.name] = problems
    if "tensorflow" in against and job.cluster.rank == 0:
        _log.warning(
            "TensorFlow's collectives can't be used between hosts, and all ranks use TCP:\n%s\n"
            "What to do: %s; or set NPU_DEVICE_BACKEND=tcp, which leaves out this warning.",
            against["tensorflow"],
            _IN_TIME,
        )
    no_nccl = why_no_nccl(hosts.devices, job.cluster.hosts, wanted)
    # The problem matters only where an mpiexec has started the ranks: other jobs don't expect MPI.
    if "mpi" in against and launchers.read_mpi() is not None:
        job.why_no_mpi = against["mpi"].split("\n")[0].strip()
    return replace(hosts, engine=engine.name, no_nccl=no_nccl)
