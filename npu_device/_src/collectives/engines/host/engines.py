"""The engines that move arrays: what connects the members of a group on each, and what runs in the background."""

from __future__ import annotations

import sys

from npu_device._src.collectives.engines.host.host_engine import HostEngine
from npu_device._src.collectives.engines.host.memory_offer import FIRST_BYTE, connect
from npu_device._src.collectives.engines.host.memory_ring import Layout, MemoryRing
from npu_device._src.collectives.engines.host.mpi_messages import MpiMessages
from npu_device._src.collectives.engines.host.small_messages import SmallMessages
from npu_device._src.collectives.engines.host.sockets import SocketMesh
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


def _always(_: Job) -> int:
    """Send segments in the background, whatever their size: TensorFlow computes meanwhile."""
    return 0


shared_memory = HostEngine(ring_of, _background_from)
messages = HostEngine(SmallMessages, lambda _: sys.maxsize)
"""Calls on little data, and the comparison of all others, between hosts."""

mpi = HostEngine(MpiMessages, _always)
tcp = HostEngine(SocketMesh, _always)
