"""The engines on arrays: how the members of a group connect on each, and which programs they run."""

from __future__ import annotations

import sys

from npu_device._src.collectives.engines.host import exchange_programs, memory_programs, small_programs
from npu_device._src.collectives.engines.host.exchange_slots import TransferSlots
from npu_device._src.collectives.engines.host.host_engine import ComparingEngine, HostEngine
from npu_device._src.collectives.engines.host.memory_offer import FIRST_BYTE, connect
from npu_device._src.collectives.engines.host.memory_ring import Layout, MemoryRing
from npu_device._src.collectives.engines.host.memory_slots import BYTES, MemorySlots
from npu_device._src.collectives.engines.host.mpi_messages import MpiMessages
from npu_device._src.collectives.engines.host.small_messages import SmallMessages
from npu_device._src.collectives.engines.host.small_slots import MessageSlots
from npu_device._src.collectives.engines.host.sockets import SocketMesh
from npu_device._src.collectives.engines.host.start_finish import Lines
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


shared_memory = ComparingEngine(
    memory_programs,
    Lines(ring_of, lambda job, pair: MemorySlots(connect(job, pair, BYTES), pair.rank), _background_from),
)
messages = ComparingEngine(small_programs, Lines(SmallMessages, MessageSlots, _never))
"""Calls on little data, and the comparison of all others, between hosts."""

mpi = HostEngine(
    exchange_programs, Lines(_mpi_messages, lambda job, pair: TransferSlots(_mpi_messages(job, pair)), _always)
)
tcp = HostEngine(exchange_programs, Lines(SocketMesh, lambda job, pair: TransferSlots(SocketMesh(job, pair)), _always))
