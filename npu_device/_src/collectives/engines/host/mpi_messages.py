"""The connection of the members of a group: a communicator of their own, and waiting that doesn't occupy a core.

MPI's blocking calls spin until they end. Here every message is started, and then tested: for a moment without a pause,
then with sleeps in between, so that TensorFlow computes meanwhile.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from npu_device._src.cluster import time_limits as limits
from npu_device._src.cluster.rank_errors import ClusterError, PeerError
from npu_device._src.collectives.engines.context import EngineContext
from npu_device._src.collectives.engines.host import transfer_rounds
from npu_device._src.collectives.engines.host.channel import Program, Stream, Wait
from npu_device._src.collectives.engines.host.message_channel import MessageChannel
from npu_device._src.collectives.engines.host.mpi_world import MpiWorld
from npu_device._src.collectives.group import Group
from npu_device._src.membership import launchers
from npu_device._src.threads import start_thread

# One tag is enough: each group has a communicator, and MPI keeps the order of a pair's messages.
_TAG = 0
_BURST = 8  # tests between two sleeps: each moves only part of what has arrived


class MpiMessages(MessageChannel):
    """The end of one member. At the first transfer the members meet, and get a communicator."""

    ahead = 8

    def __init__(self, context: EngineContext, group: Group) -> None:
        assert context.mpi_world is not None
        super().__init__(context, group)
        self._world = context.mpi_world
        self._group = group
        self._comm: Any = None
        self._meeting = self._meet()

    def send(self, member: int, data: np.ndarray) -> Any:
        return self._comm.Isend(data, member, _TAG)

    def receive(self, member: int, data: np.ndarray) -> Any:
        request = self._comm.Irecv(data, member, _TAG)
        return _Incoming(self._world.mpi.Status(), request, member, data.nbytes)

    def advance(self, program: Program, wait: Wait) -> bool:
        """Run a program, which yields the MPI request to wait for; see ``channel.Channel``."""
        try:
            return self._advance(self._meeting, wait) and self._advance(program, wait)
        except self._world.mpi.Exception as error:
            # A lost rank usually explains the error better, and its news comes by the control
            # channel.
            self._health.wait_for_news()
            raise ClusterError(
                f"MPI reports an error in group {self._group.name!r}: {error}\n"
                "Likely cause: the network between the hosts, or a rank that has just ended.\n"
                "What to do: look at the output of the other ranks, and of mpiexec."
            ) from error

    def _advance(self, program: Program, wait: Wait) -> bool:
        awaited: Any = None
        tests = 0
        started = 0.0
        checked = 0.0
        for request in program:
            if wait is Wait.NOT:
                return False
            tests += 1
            time_now = time.perf_counter()
            if request is not awaited:
                awaited = request
                started = time_now
                checked = time_now
                tests = 0
            # The longer the wait, the longer the sleep: a test takes a core from the computation.
            if tests > _BURST:
                tests = 0
                waited = time_now - started
                if waited > limits.SPIN_SECONDS:
                    time.sleep(min(limits.MPI_LONGEST_SLEEP_SECONDS, waited / 4))
            if time_now - checked > limits.CHECK_SECONDS:
                checked = time_now
                try:
                    self._health.require_running()
                except PeerError:
                    # MPI may still write to the memory of the program, which must live on.
                    self._world.abandoned.append(program)
                    raise
        return True

    def close(self) -> None:
        comm = self._comm
        self._comm = None
        if comm is not None:
            comm.Free()

    def _meet(self) -> Program:
        """Wait until all members have come, and make their communicator, which would block until then."""
        comm = self._world.comm
        ranks = self._group.ranks
        # The meeting happens in the communicator of all ranks, where only a tag tells groups apart.
        tag = self._group.digest % self._world.tags
        own_digest = np.array(self._group.digest, np.uint64)
        other_digest = np.empty((), np.uint64)
        distance = 1
        # After each round, a member knows of twice as many members.
        while distance < self.size:
            source = ranks[(self.rank - distance) % self.size]
            target = ranks[(self.rank + distance) % self.size]
            receipt = comm.Irecv(other_digest, source, tag)
            for request in (receipt, comm.Isend(own_digest, target, tag)):
                while not request.Test():
                    yield request
            if own_digest != other_digest:
                raise ClusterError(
                    f"group {self._group.name!r} and another group use the same tag of MPI.\n"
                    "What to do: give one of them another name."
                )
            distance *= 2
        all_ranks = comm.Get_group()
        member_group = all_ranks.Incl(list(ranks))
        # MPI frees no handle by itself.
        self._comm = comm.Create_group(member_group, tag)
        member_group.Free()
        all_ranks.Free()


class _Incoming(NamedTuple):
    status: Any
    request: Any
    member: int
    length: int

    def Test(self) -> bool:
        if not self.request.Test(self.status):
            return False
        # Receiving into a larger buffer is no error in MPI, so the length is checked here.
        if self.status.count != self.length:
            raise AssertionError(
                f"group rank {self.member} has sent {self.status.count} bytes where this rank expected {self.length}.\n"
                "What to do: start the job again, and report this as a bug of npu_device."
            )
        return True


# The start of MPI, only if it connects exactly the job's ranks. mpi4py is imported only if all ranks will: under MPI's
# launchers a process that starts MPI waits for all the others.


_TAGS_OF_ALL = 32767  # what MPI guarantees
_MOST_TAGS = (1 << 31) - 1  # what an int holds
_CHECKED_LENGTHS = (1, 1 << 18)


def open_world(context: EngineContext, wanted: bool) -> Sequence[str]:
    """Start MPI, and return for each rank why that fails; nothing if it works. Every rank calls this. Unless it is
    ``wanted``, MPI is started only if an ``mpiexec`` started the ranks.
    """
    stages = {
        "mpi/found": partial(_problem, context, wanted),
        "mpi/started": partial(_start, context),
        "mpi/checked": partial(_connect, context),
    }
    for name, stage in stages.items():
        problems = context.control.gather(name, stage(), limits.LATEST_ANSWER_SECONDS)
        if any(problems):
            context.mpi_world = None
            return problems
    start_thread("npu_device-mpi", _keep_going, context.mpi_world)
    return []


def _problem(context: EngineContext, wanted: bool) -> str:
    """Return why MPI can't be started on this rank; "" if it can."""
    launched = launchers.read_mpi()
    if launched is None and not wanted:
        return "not started by an mpiexec"
    if launched is not None and launched.size != context.cluster.world_size:
        return f"mpiexec started {launched.size} processes, and the job has {context.cluster.world_size} ranks"
    if importlib.util.find_spec("mpi4py") is None:
        return "mpi4py isn't installed"
    try:
        mpi4py = importlib.import_module("mpi4py")
        if "mpi4py.MPI" not in sys.modules:
            # Without this, the import would start MPI, and wait for ranks on which it may fail.
            mpi4py.rc.initialize = False
        importlib.import_module("mpi4py.MPI")
    except (ImportError, RuntimeError) as error:
        # mpi4py raises a RuntimeError if it finds no library of MPI.
        return f"mpi4py can't be imported: {error}"
    return ""


def _start(context: EngineContext) -> str:
    """Start MPI on all ranks; return the problem, "" if there is none."""
    mpi = importlib.import_module("mpi4py.MPI")
    starts_mpi = not mpi.Is_initialized()
    if starts_mpi:
        mpi.Init_thread(mpi.THREAD_MULTIPLE)
    # Registered before anything can fail: MPI that was started has to be ended even if it isn't used.
    context.at_exit.append(lambda: _end(context, mpi, starts_mpi))
    library = _library(mpi)
    own = [mpi.Get_processor_name(), ""]
    # What processes of one host have in common: the running kernel, and its network.
    with contextlib.suppress(OSError):
        kernel = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        own[1] = f"{kernel} {os.readlink('/proc/self/ns/net')}"
    announcements = context.control.gather("mpi/hosts", own, limits.LATEST_ANSWER_SECONDS)
    size = mpi.COMM_WORLD.Get_size()
    if size != context.cluster.world_size:
        return (
            f"in {library}, this rank is one of {size}: mpi4py uses another MPI than the launcher's"
        )
    if mpi.Query_thread() != mpi.THREAD_MULTIPLE:
        return f"{library} doesn't support several threads (MPI_THREAD_MULTIPLE)"
    for rank, (name, host) in enumerate(announcements):
        if name == own[0] and host != own[1]:
            return (
                f"its host has the same name as that of rank {rank}, {name!r}, but is another one: MPI can't tell them "
                "apart, and may compute wrong sums. Give every host a name of its own"
            )
    return ""


def _library(mpi: Any) -> str:
    """Return the name and the version of the library, such as "MPICH 5.0.2" or "Open MPI v5.0.11"."""
    name = str(mpi.Get_library_version()).split("\n")[0].split(",")[0]
    return " ".join(name.replace("Version:", " ").split())


def _connect(context: EngineContext) -> str:
    """Make what all ranks share, and add up known numbers with it, few and many; return the problem, or ""."""
    mpi = importlib.import_module("mpi4py.MPI")
    comm = mpi.COMM_WORLD.Split(0, context.cluster.rank)
    # By default, MPI ends all ranks at an error, without naming the group.
    comm.Set_errhandler(mpi.ERRORS_RETURN)
    tags = min(comm.Get_attr(mpi.TAG_UB) or _TAGS_OF_ALL, _MOST_TAGS)
    library = _library(mpi)
    context.mpi_world = MpiWorld(mpi, comm, tags, library)
    cluster = context.cluster
    group = Group("mpi/check", tuple(range(cluster.world_size)), cluster.rank)
    channel = MpiMessages(context, group)
    wrong = ""
    for length in _CHECKED_LENGTHS:
        numbers = np.arange(length, dtype=np.int32)
        stream = Stream([numbers.shape], numbers.dtype, [numbers * (cluster.rank + 1)])
        flat, sums = stream.results(context.buffers, numbers.dtype)
        ranks = range(group.size)
        rounds = transfer_rounds.reduce(channel, stream, flat, "sum", ranks)
        channel.advance(channel.run(rounds, None), Wait.SLEEPING)
        if (sums[0] != numbers * (group.size * (group.size + 1) // 2)).any():
            wrong = f"a sum of {length} numbers is wrong in MPI ({library})"
    channel.close()
    return wrong


def _keep_going(world: MpiWorld) -> None:
    """Let MPI proceed now and then: it may still have to send what a transfer that has ended here has left to it."""
    while not world.ended.wait(limits.MPI_TICK_SECONDS):
        world.comm.Iprobe()


def _end(context: EngineContext, mpi: Any, starts_mpi: bool) -> None:
    """End MPI together with the other ranks. If the job has failed, end all of them, or MPI would wait for them."""
    if context.mpi_world is not None:
        context.mpi_world.ended.set()
    if context.health.has_failed:
        sys.stdout.flush()
        sys.stderr.flush()
        # In this time, the other ranks say why they end.
        time.sleep(limits.MPI_GRACE_SECONDS)
        mpi.COMM_WORLD.Abort(1)
    if starts_mpi and not mpi.Is_finalized():
        mpi.Finalize()
