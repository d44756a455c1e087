"""The members' heads, and beside them little data: one round, in which every member gets all of it.

The message always has the same form, whatever the operation, so that members whose calls differ find that out.
"""

from __future__ import annotations

import struct
from collections.abc import Generator, Iterator, Sequence
from typing import Any, Union

import numpy as np
import tensorflow as tf

from npu_device._src.collectives.engines.host.programs import Round
from npu_device._src.collectives.engines.host.queue import ALIGNMENT, HEAD_WORDS, Head, Program, compares, require_same
from npu_device._src.collectives.engines.host.sockets import SocketMesh, SocketMessage
from npu_device._src.collectives.group import Group
from npu_device._src.collectives.job import Job

_HEAD = struct.Struct(f"<{HEAD_WORDS}i")
_PURPOSE = 1
_ROOM_OF_ALL_BYTES = 64 << 10
_LEAST_ROOM_BYTES = ALIGNMENT  # a scalar's
MOST_ROOM_BYTES = 1024


def room(members: int) -> int:
    """Return the largest size in bytes of a member's data that travels beside its head."""
    return min(MOST_ROOM_BYTES, max(_LEAST_ROOM_BYTES, _ROOM_OF_ALL_BYTES // members))


def fits(members: int, tensors: Sequence[Union[tf.Tensor, tf.TensorSpec]]) -> Union[bool, tf.Tensor]:
    """Return whether tensors fit into a message: a bool tensor if only the running graph knows. Ranks that have traced
    with different static shapes come to the same answer.

    A call without tensors moves a scalar.
    """
    known, unknown = 0 if tensors else ALIGNMENT, []
    for tensor in tensors:
        elements = tensor.shape.num_elements()
        if elements is None:
            unknown.append(_aligned(tf.size(tensor, tf.int64) * tensor.dtype.size))
        else:
            known += _aligned(elements * tensor.dtype.size)
    if known > room(members) or not unknown:
        return known <= room(members)
    return tf.add_n(unknown) + known <= room(members)


def _aligned(size: Any) -> Any:
    return -(-size // ALIGNMENT) * ALIGNMENT


class SmallMessages(SocketMesh):
    """One member's end; see ``queue.Channel``. In each step of a round a member sends to another one, and then knows of
    twice as many.
    """

    reaches_all = True

    def __init__(self, job: Job, group: Group) -> None:
        steps = [1 << power for power in range((group.size - 1).bit_length())]
        to, source = ([(group.rank + sign * step) % group.size for step in steps] for sign in (1, -1))
        super().__init__(job, group, to, source, _PURPOSE)
        self.slot_bytes = room(group.size)

    def run(self, rounds: Iterator[Round], head: Head | None) -> Program:
        """Run one round, and compare the heads, if the ranks haven't agreed on the call.

        Raises:
            Mismatch: the heads differ.
        """
        for one in rounds:
            assert head is not None
            [(first, last), *others] = one.spans
            mine = np.zeros(last - first + len(others) * one.stride, one.dtype)
            if mine.nbytes > self.slot_bytes:
                raise AssertionError(f"{mine.nbytes} bytes don't fit into a message; operation.route_of is wrong")
            if one.source is not None:
                one.fill(mine)
            row = _HEAD.pack(*head) + mine.tobytes()
            rows = yield from self._gather(row.ljust(_HEAD.size + self.slot_bytes, b"\0") if compares(head) else row)
            require_same([_HEAD.unpack_from(row) for row in rows])
            slots = [np.frombuffer(row, one.dtype, len(mine), _HEAD.size) for row in rows]
            one.take(np.stack(slots), self.rank)

    def _gather(self, row: bytes) -> Generator[SocketMessage, None, list[bytes]]:
        """Return all members' rows, by member, given this member's; they have the same length on all."""
        known = [row]  # of this member, the one before it, and so on
        sent: list[SocketMessage] = []
        while len(known) < self.size:
            distance = len(known)
            count = min(distance, self.size - distance)
            found = np.empty(count * len(row), np.uint8)
            coming = self.receive((self.rank - distance) % self.size, found)
            following = np.frombuffer(b"".join(known[:count]), np.uint8)
            sent.append(self.send((self.rank + distance) % self.size, following))
            while not coming.Test():
                yield coming
            rows = found.tobytes()
            known += [rows[first : first + len(row)] for first in range(0, len(rows), len(row))]
        for message in sent:
            while not message.Test():
                yield message
        return [known[(self.rank - member) % self.size] for member in range(self.size)]
