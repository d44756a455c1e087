"""The backend: the operations on arrays, run by programs on memory that the members of a group share."""

from __future__ import annotations

from functools import partial

from npu_device._src.cluster.runtime import Runtime
from npu_device._src.collectives.backends.arrays.lines import GroupLine, Line, Lines, PairLine
from npu_device._src.collectives.backends.arrays.mailbox import Mailbox
from npu_device._src.collectives.backends.arrays.operations import ComparingBackend
from npu_device._src.collectives.backends.shared_memory import programs, slots
from npu_device._src.collectives.backends.shared_memory.channel import Channel, Layout
from npu_device._src.collectives.backends.shared_memory.connection import FIRST_BYTE, connect
from npu_device._src.collectives.group import Group

# So that long operations proceed while TensorFlow computes.
_BACKGROUND_FROM_BYTES = 256 << 10


def channel_of(runtime: Runtime, group: Group) -> Channel:
    """Connect to the other members of a group, and return this rank's end of their channel."""
    segment = connect(runtime, group, Layout(group.size).bytes)
    return Channel(
        segment.memory, group.size, group.rank, segment.check, FIRST_BYTE, segment.settle, runtime.has_own_core
    )


def _mailbox(runtime: Runtime, group: Group) -> Mailbox:
    segment = connect(runtime, group, slots.BYTES)
    return Mailbox(slots.MemorySlots(segment.memory, FIRST_BYTE, group.rank), segment.check, segment.settle)


def _line(runtime: Runtime, group: Group) -> Line:
    if group.tag is None:
        return GroupLine(runtime, group, partial(channel_of, runtime, group), _BACKGROUND_FROM_BYTES)
    return PairLine(runtime, group, partial(_mailbox, runtime, group))


shared_memory = ComparingBackend(programs, Lines(_line))
