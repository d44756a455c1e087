"""The engines on arrays: how the members of a group connect on each, and which programs they run."""

from __future__ import annotations

import sys
from functools import partial
from typing import Callable

from npu_device._src.collectives.engines.host import exchange, memory_programs, small_programs
from npu_device._src.collectives.engines.host.host_engine import ComparingEngine, HostEngine
from npu_device._src.collectives.engines.host.memory_offer import FIRST_BYTE, connect
from npu_device._src.collectives.engines.host.memory_ring import Layout, MemoryRing
from npu_device._src.collectives.engines.host.mpi_messages import MpiMessages
from npu_device._src.collectives.engines.host.queue import Channel
from npu_device._src.collectives.engines.host.sockets import SocketMesh
from npu_device._src.collectives.engines.host.start_finish import AllCalls, GroupCalls
from npu_device._src.collectives.group import Group
from npu_device._src.collectives.job import Job

_BACKGROUND_FROM_BYTES = 256 << 10


def ring_of(job: Job, group: Group) -> MemoryRing:
    """Connect to the other members of a group, and return this rank's end of their memory."""
    segment = connect(job, group, Layout(group.size).bytes)
    return MemoryRing(
        segment.memory, group.size, group.rank, segment.check, FIRST_BYTE, segment.settle, job.has_own_core
    )


def _background_from(job: Job) -> int:
    """Let long operations in shared memory proceed while TensorFlow computes, unless they would take its only core from
    it: all of their work is the cores', and the longer way takes more of it.
    """
    return _BACKGROUND_FROM_BYTES if job.cores > 1 else sys.maxsize


def _mpi_messages(job: Job, group: Group) -> MpiMessages:
    assert job.mpi_world is not None
    return MpiMessages(job.mpi_world, job, group)


def _always(_: Job) -> int:
    """Send segments in the background, whatever their size: TensorFlow computes meanwhile."""
    return 0


def _never(_: Job) -> int:
    return sys.maxsize


def _calls(connect: Callable[[Job, Group], Channel], background_from: Callable[[Job], int]) -> AllCalls:
    return AllCalls(lambda job, group: GroupCalls(job, group, partial(connect, job, group), background_from(job)))


shared_memory = ComparingEngine(memory_programs, _calls(ring_of, _background_from))
messages = ComparingEngine(small_programs, _calls(small_programs.mesh_of, _never))
"""Calls on little data, and the comparison of all others, between hosts."""

mpi = HostEngine(exchange, _calls(_mpi_messages, _always))
tcp = HostEngine(exchange, _calls(SocketMesh, _always))
