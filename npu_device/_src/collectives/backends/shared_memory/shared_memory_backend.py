"""The backend: the operations on arrays, run by programs on memory that the members of a group share."""

from __future__ import annotations

import sys

from npu_device._src.collectives.backends.arrays.lines import Lines
from npu_device._src.collectives.backends.arrays.operations import ComparingBackend
from npu_device._src.collectives.backends.shared_memory import programs
from npu_device._src.collectives.backends.shared_memory.channel import Channel, Layout
from npu_device._src.collectives.backends.shared_memory.connection import FIRST_BYTE, connect
from npu_device._src.collectives.backends.shared_memory.slots import BYTES, MemorySlots
from npu_device._src.collectives.group import Group
from npu_device._src.collectives.job import Job

_BACKGROUND_FROM_BYTES = 256 << 10


def channel_of(job: Job, group: Group) -> Channel:
    """Connect to the other members of a group, and return this rank's end of their channel."""
    segment = connect(job, group, Layout(group.size).bytes)
    return Channel(segment.memory, group.size, group.rank, segment.check, FIRST_BYTE, segment.settle, job.has_own_core)


def _slots_of(job: Job, pair: Group) -> MemorySlots:
    return MemorySlots(connect(job, pair, BYTES), pair.rank)


def _background_from(job: Job) -> int:
    """Let long operations proceed while TensorFlow computes, unless they would take its only core from it: all of this
    backend's work is the cores', and the longer way takes more of it.
    """
    return _BACKGROUND_FROM_BYTES if job.cores > 1 else sys.maxsize


shared_memory = ComparingBackend(programs, Lines(channel_of, _slots_of, _background_from))
