"""The backend: the operations on arrays, run by programs on TCP connections."""

from __future__ import annotations

from npu_device._src.collectives.backends.arrays.lines import Lines
from npu_device._src.collectives.backends.arrays.operations import ArrayBackend
from npu_device._src.collectives.backends.point_to_point import programs
from npu_device._src.collectives.backends.point_to_point.slots import TransferSlots
from npu_device._src.collectives.backends.tcp.channel import Channel
from npu_device._src.collectives.group import Group
from npu_device._src.collectives.job import Job

# Segments are sent while TensorFlow computes, whatever their size.
_BACKGROUND_FROM_BYTES = 0


def _slots_of(job: Job, pair: Group) -> TransferSlots:
    return TransferSlots(Channel(job, pair))


tcp = ArrayBackend(programs, Lines(Channel, _slots_of, lambda _: _BACKGROUND_FROM_BYTES))
