"""The backend: the operations on arrays, run by programs that let MPI move the bytes."""

from __future__ import annotations

from npu_device._src.collectives.backends.arrays.lines import Lines
from npu_device._src.collectives.backends.arrays.operations import ArrayBackend
from npu_device._src.collectives.backends.mpi.channel import Channel
from npu_device._src.collectives.backends.point_to_point import programs
from npu_device._src.collectives.backends.point_to_point.slots import TransferSlots
from npu_device._src.collectives.group import Group
from npu_device._src.collectives.job import Job

# MPI proceeds only if a thread tests its requests, so even the smallest of several operations needs one.
_BACKGROUND_FROM_BYTES = 0


def _channel(job: Job, group: Group) -> Channel:
    assert job.mpi_world is not None
    return Channel(job.mpi_world, job, group)


def _slots_of(job: Job, pair: Group) -> TransferSlots:
    return TransferSlots(_channel(job, pair))


mpi = ArrayBackend(programs, Lines(_channel, _slots_of, lambda _: _BACKGROUND_FROM_BYTES))
