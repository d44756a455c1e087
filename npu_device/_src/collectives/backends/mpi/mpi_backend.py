"""The backend: the operations on arrays, run by programs that let MPI move the bytes."""

from __future__ import annotations

from npu_device._src.cluster.runtime import Runtime
from npu_device._src.collectives.backends.arrays.lines import Lines
from npu_device._src.collectives.backends.arrays.operations import ArrayBackend
from npu_device._src.collectives.backends.mpi.channel import Channel
from npu_device._src.collectives.backends.mpi.mpi_world import mpi_world_of
from npu_device._src.collectives.backends.point_to_point import programs
from npu_device._src.collectives.backends.point_to_point.slots import TransferSlots
from npu_device._src.collectives.group import Group

# MPI proceeds only if a thread tests its requests, so even the smallest of several operations needs one.
_BACKGROUND_FROM_BYTES = 0


def _channel(runtime: Runtime, group: Group) -> Channel:
    world = mpi_world_of(runtime)
    assert world is not None
    return Channel(world, runtime, group)


def _slots_of(runtime: Runtime, pair: Group) -> TransferSlots:
    return TransferSlots(_channel(runtime, pair))


mpi = ArrayBackend(programs, Lines(_channel, _slots_of, lambda _: _BACKGROUND_FROM_BYTES))
