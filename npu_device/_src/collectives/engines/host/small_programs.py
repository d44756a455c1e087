"""The operations as programs on a channel, in one round: the members' heads, and beside them little data.

The round always has the same form, whatever the operation, so that members whose calls differ find that out.
"""

from __future__ import annotations

import struct
from collections.abc import Generator, Sequence
from typing import Any, Optional, Union

import numpy as np
import tensorflow as tf

from npu_device._src.collectives.engines.host.arithmetic import folding
from npu_device._src.collectives.engines.host.queue import HEAD_WORDS, Head, Program, compares, require_same
from npu_device._src.collectives.engines.host.sockets import Message, SocketMesh
from npu_device._src.collectives.engines.host.stream import ALIGNMENT, Stream
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


def all_reduce(channel: SocketMesh, stream: Stream, result: np.ndarray, reduction: str, head: Head) -> Program:
    """Reduce a stream; ``result`` is as long as the stream, and may be of another dtype."""
    rows = yield from _rows(channel, stream, head)
    folding(reduction, channel.size)(rows, result)


def reduce(
    channel: SocketMesh, stream: Stream, result: Optional[np.ndarray], reduction: str, root: int, head: Head
) -> Program:
    """Reduce a stream to the root, the only one with a ``result``."""
    del root
    rows = yield from _rows(channel, stream, head)
    if result is not None:
        folding(reduction, channel.size)(rows, result)


def broadcast(channel: SocketMesh, stream: Stream, result: Optional[np.ndarray], root: int, head: Head) -> Program:
    """Send the root's stream, of bytes, into the ``result`` of all other members."""
    rows = yield from _rows(channel, stream, head)
    if result is not None:
        result[:] = rows[root]


def all_gather(channel: SocketMesh, row: np.ndarray, result: np.ndarray, head: Head) -> Program:
    """Gather all members' rows, shape [n], into ``result``, shape [size, n]."""
    rows = yield from _round(channel, row, head)
    for number, found in enumerate(rows):
        result[number] = np.frombuffer(found, result.dtype)


def all_to_all(channel: SocketMesh, rows: np.ndarray, result: np.ndarray, head: Head) -> Program:
    """Send row i of ``rows`` to member i, and receive row i of ``result`` from member i: both [size, n]."""
    everything = yield from _round(channel, rows, head)
    for number, found in enumerate(everything):
        result[number] = np.frombuffer(found, result.dtype).reshape(result.shape)[channel.rank]


def meet(channel: SocketMesh, head: Head) -> Program:
    """Exchange only the heads, if the ranks haven't agreed on the call."""
    if compares(head):
        yield from _round(channel, np.empty(0, np.uint8), head)


def _rows(channel: SocketMesh, stream: Stream, head: Head) -> Generator[Message, None, list[np.ndarray]]:
    """Return all members' streams."""
    packed = np.zeros(stream.length, stream.dtype)
    stream.copy_in(0, packed)
    rows = yield from _round(channel, packed, head)
    return [np.frombuffer(row, stream.dtype) for row in rows]


def _round(channel: SocketMesh, mine: np.ndarray, head: Head) -> Generator[Message, None, list[bytes]]:
    """Compare the heads, if the ranks haven't agreed on the call; return all members' data, by member.

    Args:
        channel: the members.
        mine: this member's data, of the same size on all.
        head: this member's head.

    Raises:
        Mismatch: the heads differ.
    """
    space = room(channel.size)
    if mine.nbytes > space:
        raise AssertionError(f"{mine.nbytes} bytes don't fit into a message; choice.route_of is wrong")
    row = _HEAD.pack(*head) + mine.tobytes()
    end = len(row)
    rows = yield from _gather(channel, row.ljust(_HEAD.size + space, b"\0") if compares(head) else row)
    require_same([_HEAD.unpack_from(row) for row in rows])
    return [row[_HEAD.size : end] for row in rows]


def mesh_of(job: Job, group: Group) -> SocketMesh:
    """Connect to the members with which this one exchanges messages: in each round it sends to another one, and then
    knows of twice as many.
    """
    steps = [1 << power for power in range((group.size - 1).bit_length())]
    to, source = ([(group.rank + sign * step) % group.size for step in steps] for sign in (1, -1))
    return SocketMesh(job, group, to, source, _PURPOSE)


def _gather(mesh: SocketMesh, row: bytes) -> Generator[Message, None, list[bytes]]:
    """Return all members' rows, by member, given this member's; they have the same length on all."""
    known = [row]  # of this member, the one before it, and so on
    sent: list[Message] = []
    while len(known) < mesh.size:
        distance = len(known)
        count = min(distance, mesh.size - distance)
        found = np.empty(count * len(row), np.uint8)
        coming = mesh.receive((mesh.rank - distance) % mesh.size, found)
        sent.append(mesh.send((mesh.rank + distance) % mesh.size, np.frombuffer(b"".join(known[:count]), np.uint8)))
        while not coming.Test():
            yield coming
        rows = found.tobytes()
        known += [rows[first : first + len(row)] for first in range(0, len(rows), len(row))]
    for message in sent:
        while not message.Test():
            yield message
    return [known[(mesh.rank - member) % mesh.size] for member in range(mesh.size)]
