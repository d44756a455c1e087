"""Start MPI on this rank: done by all ranks together, and only if it connects exactly the job's ranks.

mpi4py is imported only if all ranks will: under MPI's launchers a process that starts MPI waits for all the others.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from npu_device._src.cluster.time_limits import LATEST_ANSWER_SECONDS, MPI_GRACE_SECONDS, MPI_TICK_SECONDS
from npu_device._src.collectives import job as jobs
from npu_device._src.collectives.engines.host import programs
from npu_device._src.collectives.engines.host.mpi_messages import MpiMessages, MpiWorld
from npu_device._src.collectives.engines.host.programs import Stream
from npu_device._src.collectives.engines.host.queue import Wait, head_of
from npu_device._src.collectives.group import Group
from npu_device._src.collectives.job import Job
from npu_device._src.membership import mpiexec

_TAGS_OF_ALL, _MOST_TAGS = 32767, (1 << 31) - 1  # what MPI guarantees, and what an int holds
_CHECKED_LENGTHS = (1, 1 << 18)


def open_world(job: Job, wanted: bool) -> Sequence[str]:
    """Start MPI, and return for each rank why that fails; nothing if it works. Every rank calls this.

    Args:
        job: the job.
        wanted: ``NPU_DEVICE_BACKEND`` is ``mpi``; otherwise MPI is started only if an ``mpiexec`` started the ranks.

    Raises:
        TimeoutError: a rank did not come.
    """
    problems = job.store.gather("mpi/found", _problem(job, wanted), LATEST_ANSWER_SECONDS)
    if not any(problems):
        problems = job.store.gather("mpi/started", _start(job), LATEST_ANSWER_SECONDS)
    if not any(problems):
        world = job.mpi_world = _world(job)
        problems = job.store.gather("mpi/checked", _check_sum(job, world), LATEST_ANSWER_SECONDS)
        if any(problems):
            job.mpi_world = None
        else:
            _keep_going(world)
    return list(problems) if any(problems) else []


def _problem(job: Job, wanted: bool) -> str:
    """Return why MPI can't be started on this rank; "" if it can."""
    launched = mpiexec.read()
    if launched is None and not wanted:
        return "not started by an mpiexec"
    if launched is not None and launched.size != job.cluster.world_size:
        return f"mpiexec started {launched.size} processes, and the job has {job.cluster.world_size} ranks"
    if importlib.util.find_spec("mpi4py") is None:
        return "mpi4py isn't installed"
    try:
        mpi4py: Any = importlib.import_module("mpi4py")
        if "mpi4py.MPI" not in sys.modules:
            mpi4py.rc.initialize = False  # it would wait for ranks on which the import may fail
        importlib.import_module("mpi4py.MPI")
    except (ImportError, RuntimeError) as error:  # RuntimeError: it finds no library of MPI
        return f"mpi4py can't be imported: {error}"
    return ""


def _start(job: Job) -> str:
    """Start MPI on all ranks; return the problem, "" if there is none."""
    mpi: Any = importlib.import_module("mpi4py.MPI")
    starts = not mpi.Is_initialized()
    if starts:
        mpi.Init_thread(mpi.THREAD_MULTIPLE)
    jobs.on_exit(lambda: _end(job, mpi, starts))
    library = _library(mpi)
    card = [mpi.Get_processor_name(), _host()]
    cards = job.store.gather("mpi/hosts", card, LATEST_ANSWER_SECONDS)
    size = mpi.COMM_WORLD.Get_size()
    if size != job.cluster.world_size:
        return f"in {library}, this rank is one of {size}: mpi4py uses another MPI than the launcher's"
    if mpi.Query_thread() != mpi.THREAD_MULTIPLE:
        return f"{library} doesn't support several threads (MPI_THREAD_MULTIPLE)"
    for rank, (name, host) in enumerate(cards):
        if name == card[0] and host != card[1]:
            return (
                f"its host has the same name as that of rank {rank}, {name!r}, but is another one: MPI can't tell them "
                "apart, and may compute wrong sums. Give every host a name of its own"
            )
    return ""


def _world(job: Job) -> MpiWorld:
    mpi: Any = importlib.import_module("mpi4py.MPI")
    comm = mpi.COMM_WORLD.Split(0, job.cluster.rank)
    comm.Set_errhandler(mpi.ERRORS_RETURN)
    return MpiWorld(mpi, comm, min(comm.Get_attr(mpi.TAG_UB) or _TAGS_OF_ALL, _MOST_TAGS), _library(mpi))


def _library(mpi: Any) -> str:
    """Return the name and the version of the library, such as "MPICH 5.0.2" or "Open MPI v5.0.11"."""
    first = str(mpi.Get_library_version()).split("\n")[0].split(",")[0]
    return " ".join(first.replace("Version:", " ").split())


def _host() -> str:
    """Return what processes of one host have in common: the running kernel, and its network."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/net')}"
    except OSError:
        return ""


def _check_sum(job: Job, world: MpiWorld) -> str:
    """Add up known numbers, few and many; return the problem, "" if the sums are right."""
    cluster = job.cluster
    group = Group("mpi/check", tuple(range(cluster.world_size)), cluster.rank)
    channel = MpiMessages(job, group)
    wrong = ""
    for length in _CHECKED_LENGTHS:
        numbers = np.arange(length, dtype=np.int32)
        stream = Stream([numbers.shape], numbers.dtype, [numbers * (cluster.rank + 1)])
        flat, found = stream.results(job.buffers, numbers.dtype)
        program = programs.reduce(channel, stream, flat, numbers.dtype, "sum", range(group.size), head_of(None, 0))
        channel.advance(program, Wait.SLEEPING)
        if (found[0] != numbers * (group.size * (group.size + 1) // 2)).any():
            wrong = f"a sum of {length} numbers is wrong in MPI ({world.library})"
    channel.close()
    return wrong


def _keep_going(world: MpiWorld) -> None:
    """Let MPI proceed now and then: it may still have to send what an operation that is over here has left to it."""

    def run() -> None:
        while not world.ended.wait(MPI_TICK_SECONDS):
            world.comm.Iprobe()

    threading.Thread(target=run, name="npu_device-mpi", daemon=True).start()


def _end(job: Job, mpi: Any, starts: bool) -> None:
    """End MPI together with the other ranks. If the job has failed, end all of them, or MPI would wait for them."""
    if job.mpi_world is not None:
        job.mpi_world.ended.set()
    if job.health.has_failed:
        sys.stdout.flush()
        sys.stderr.flush()
        time.sleep(MPI_GRACE_SECONDS)  # in which the other ranks say why they end
        mpi.COMM_WORLD.Abort(1)
    if starts and not mpi.Is_finalized():
        mpi.Finalize()
