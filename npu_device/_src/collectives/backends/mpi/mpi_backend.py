"""The backend: the operations on arrays, run by programs that let MPI move the bytes."""

from __future__ import annotations

from functools import partial

from npu_device._src.cluster.runtime import Runtime
from npu_device._src.collectives.backends.arrays.lines import GroupLine, Line, Lines, PairLine
from npu_device._src.collectives.backends.arrays.mailbox import Mailbox
from npu_device._src.collectives.backends.arrays.operations import ArrayBackend
from npu_device._src.collectives.backends.mpi import programs
from npu_device._src.collectives.backends.mpi.channel import Channel
from npu_device._src.collectives.backends.mpi.mpi_world import mpi_world_of
from npu_device._src.collectives.backends.mpi.slots import MpiSlots
from npu_device._src.collectives.group import Group

# MPI proceeds only if a thread tests its requests, so even the smallest of several operations needs one.
_BACKGROUND_FROM_BYTES = 0


def _channel(runtime: Runtime, group: Group) -> Channel:
    world = mpi_world_of(runtime)
    assert world is not None
    return Channel(world, runtime, group)


def _mailbox(runtime: Runtime, group: Group) -> Mailbox:
    channel = _channel(runtime, group)
    return Mailbox(MpiSlots(channel), runtime.health.require_running, channel.settle)


def _line(runtime: Runtime, group: Group) -> Line:
    if group.tag is None:
        return GroupLine(runtime, group, partial(_channel, runtime, group), _BACKGROUND_FROM_BYTES)
    return PairLine(runtime, group, partial(_mailbox, runtime, group))


mpi = ArrayBackend(programs, Lines(_line))
