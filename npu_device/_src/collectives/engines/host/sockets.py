"""The connections of the members of a group: two for each pair of them, one in each direction.

The thread that waits for a message advances all messages of the mesh: it sends what the kernel takes, and receives what
has come, so that members that send to each other at the same time never wait for each other's buffers.

The connections are made in a thread of their own when the group's first transfer starts, so that nothing else waits for
them; transfers do not proceed before.
"""

from __future__ import annotations

import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future, wait
from functools import partial
from typing import Any, Callable, Union

import numpy as np
import tensorflow as tf

from npu_device._src.cluster.peers import Peers
from npu_device._src.cluster.time_limits import CHECK_SECONDS, SPIN_SECONDS
from npu_device._src.collectives.engines.context import EngineContext
from npu_device._src.collectives.engines.host import channel
from npu_device._src.collectives.engines.host.buffers import ALIGNMENT
from npu_device._src.collectives.engines.host.channel import Head, Program, Round, Wait
from npu_device._src.collectives.engines.host.message_channel import MessageChannel
from npu_device._src.collectives.group import Group
from npu_device._src.threads import start_thread

_LENGTH = struct.Struct("<Q")


class SocketMessage:
    """One message on its way: its length, and its bytes."""

    def __init__(self, direction: Direction, data: np.ndarray) -> None:
        self._direction = direction
        self.size = data.nbytes
        self.length = bytearray(_LENGTH.size)
        if direction.sends:
            self.length = bytearray(_LENGTH.pack(self.size))
        self.unmoved = [memoryview(self.length), data.data]

    @property
    def has_ended(self) -> bool:
        return not self.unmoved

    def Test(self) -> bool:
        """Advance the messages of its connection; return whether this one has ended."""
        if self.unmoved:
            self._direction.advance()
        return self.has_ended


class Direction:
    """One direction between two ranks: its connection, and its messages in their order."""

    def __init__(self, busy: Busy, peers: Peers, rank: int, sends: bool) -> None:
        self._busy = busy
        self._peers = peers
        self._rank = rank
        self.sends = sends
        # Set once, before the first message; a send or receive never blocks.
        self.connection: socket.socket
        self.messages = deque[SocketMessage]()
        # Why the connection has ended. That is an error only for those who still wait for a message: the other member
        # may have destroyed the group after its last one.
        self.lost: str | None = None

    def connect(self, stream_id: int, gives_up: Callable[[], bool]) -> socket.socket | None:
        """Return the connection for a stream; None if this rank gives up before the other one has made it."""
        if self.sends:
            return self._peers.connect(self._rank, stream_id)
        return self._peers.accept(self._rank, stream_id, gives_up)

    def add(self, data: np.ndarray) -> SocketMessage:
        """Start a message; as much as the kernel takes leaves at once."""
        message = SocketMessage(self, data)
        self.messages.append(message)
        if self.sends:
            self.advance()
        if not message.has_ended and self.lost is None:
            self._busy.add(self)
        # The message waits for the network only if something is left to move: most small messages have gone by now.
        return message

    def advance(self) -> None:
        """Send or receive what is possible without waiting."""
        try:
            while self.messages and self.lost is None:
                self._move(self.messages[0])
        except BlockingIOError:
            return
        except OSError as error:
            self.lost = str(error)
        self._busy.remove(self)

    def check(self) -> None:
        """Raise PeerError if the connection has ended and messages can't come or go any more."""
        if self.lost is not None and self.messages:
            self._peers.raise_for(self._rank, self.lost)

    def _move(self, message: SocketMessage) -> None:
        unmoved = message.unmoved
        if self.sends:
            # The length and the data leave with one system call.
            moved = self.connection.sendmsg(unmoved)
        else:
            moved = self.connection.recvmsg_into(unmoved)[0]
        if not moved:
            raise ConnectionError("it has closed its connection")
        while unmoved and moved >= unmoved[0].nbytes:
            moved -= unmoved.pop(0).nbytes
        # The length has come as a whole as soon as only the data are left.
        if len(unmoved) < 2 and (length := _LENGTH.unpack(message.length)[0]) != message.size:
            raise AssertionError(
                f"rank {self._rank} has sent {length} bytes where this rank expected {message.size}.\n"
                "What to do: start the job again, and report this as a bug of npu_device."
            )
        if unmoved:
            unmoved[0] = unmoved[0][moved:]
        else:
            self.messages.popleft()


class Busy:
    """The directions in which messages are on their way, and waiting for one of them."""

    def __init__(self) -> None:
        self._poll = select.poll()
        self._directions: dict[int, Direction] = {}

    def add(self, direction: Direction) -> None:
        """Add a direction, if it isn't there."""
        descriptor = direction.connection.fileno()
        if descriptor not in self._directions:
            self._directions[descriptor] = direction
            event = select.POLLIN
            if direction.sends:
                event = select.POLLOUT
            self._poll.register(descriptor, event)

    def remove(self, direction: Direction) -> None:
        """Remove a direction, if it is there."""
        descriptor = direction.connection.fileno()
        if self._directions.pop(descriptor, None) is not None:
            self._poll.unregister(descriptor)

    def advance(self, seconds: float, spins: bool) -> bool:
        """Wait until some message can proceed, spinning first, and advance it; return False if none can in time."""
        until = time.perf_counter() + SPIN_SECONDS
        ready = self._poll.poll(0)
        while spins and not ready and time.perf_counter() < until:
            ready = self._poll.poll(0)
        ready = ready or self._poll.poll(1000 * seconds)
        for descriptor, _ in ready:
            self._directions[descriptor].advance()
        return bool(ready)


class SocketMesh(MessageChannel):
    """One member's end, which sends to all others and receives from them, unless some are named. ``purpose`` tells the
    meshes of a group apart.
    """

    def __init__(
        self,
        context: EngineContext,
        group: Group,
        targets: Sequence[int] = (),
        sources: Sequence[int] = (),
        purpose: int = 0,
    ) -> None:
        super().__init__(context, group)
        self._stream_id = group.digest ^ purpose
        self._spins = context.has_own_core
        # All directions share one, so that waiting for one message advances the others.
        self._busy = Busy()
        other_members = self.other_members(self.rank)
        direction = partial(Direction, self._busy, context.peers)
        self._outgoing = {
            member: direction(group.ranks[member], True) for member in targets or other_members
        }
        self._incoming = {
            member: direction(group.ranks[member], False) for member in sources or other_members
        }
        self._directions = [*self._outgoing.values(), *self._incoming.values()]
        self._connected = Future[None]()
        self._closing = threading.Lock()
        self._is_closed = False
        # A thread connects, since members come only when they first use the group.
        start_thread("npu_device-connect", self._connect)

    def _connect(self) -> None:
        # Outgoing connections come first: a thread of ``Peers`` accepts incoming ones at any time.
        try:
            for direction in self._directions:
                if self._is_closed:
                    break
                connection = direction.connect(self._stream_id, lambda: self._is_closed)
                with self._closing:
                    if connection is not None:
                        direction.connection = connection
                        # ``close`` may have run while this connection was made; it closes only what
                        # it can see.
                        if self._is_closed:
                            connection.close()
            self._connected.set_result(None)
        except BaseException as error:
            self._connected.set_exception(error)

    def send(self, member: int, data: np.ndarray) -> SocketMessage:
        return self._outgoing[member].add(data)

    def receive(self, member: int, data: np.ndarray) -> SocketMessage:
        return self._incoming[member].add(data)

    def advance(self, program: Program, wait: Wait) -> bool:
        """Run a program, which yields the message to wait for; see ``channel.Channel``."""
        seconds = CHECK_SECONDS
        if wait is Wait.NOT:
            seconds = 0
        while not self._wait_until_connected(seconds):
            if wait is Wait.NOT:
                return False
        for message in program:
            if wait is Wait.NOT:
                return False
            spins = wait is Wait.SPINNING and self._spins
            # It spins only for the first news of a message: on a slow link, later news take longer anyway.
            while not message.has_ended:
                if not self._busy.advance(CHECK_SECONDS, spins):
                    self._health.require_running()
                    for direction in self._directions:
                        direction.check()
                spins = False
        return True

    def _wait_until_connected(self, seconds: float) -> bool:
        """Return False if the connections aren't there in time; raise what has made them fail."""
        if not self._connected.done():
            self._health.require_running()
            if not wait([self._connected], seconds).done:
                return False
        self._connected.result()
        return True

    def close(self) -> None:
        """Close the connections."""
        with self._closing:
            self._is_closed = True
            for direction in self._directions:
                # A direction whose connection was never made has none to close.
                if hasattr(direction, "connection"):
                    direction.connection.close()


# The members' heads, and beside them little data: one round, in which every member gets all of it. The message always
# has the same form, whatever the collective, so that members whose calls differ find that out.

_HEAD = struct.Struct(f"<{channel.HEAD_WORDS}i")
_PURPOSE = 1
_ROOM_OF_ALL_BYTES = 64 << 10
_LEAST_ROOM_BYTES = ALIGNMENT  # room for a scalar


def room(context: EngineContext, member_count: int) -> int:
    """Return the largest size in bytes of the data of a member that travels beside its head."""
    return min(
        context.most_message_bytes, max(_LEAST_ROOM_BYTES, _ROOM_OF_ALL_BYTES // member_count)
    )


def fits(
    context: EngineContext, member_count: int, tensors: Sequence[Union[tf.Tensor, tf.TensorSpec]]
) -> Union[bool, tf.Tensor]:
    """Return whether tensors fit into a message: a bool tensor if only the running graph knows. Ranks that have traced
    with different static shapes come to the same answer. A call without tensors moves a scalar.
    """
    limit = room(context, member_count)
    size = ALIGNMENT
    if tensors:
        size = 0
    dynamic = []
    for tensor in tensors:
        count = tensor.shape.num_elements()
        if count is None:
            dynamic.append(_aligned(tf.size(tensor, tf.int64) * tensor.dtype.size))
        else:
            size += _aligned(count * tensor.dtype.size)
    if size > limit or not dynamic:
        return size <= limit
    return tf.add_n(dynamic) + size <= limit


def _aligned(size: Any) -> Any:
    return -(-size // ALIGNMENT) * ALIGNMENT


class SmallMessages(SocketMesh):
    """One member's end; see ``channel.Channel``. In each step of a round a member sends to another one, and then knows
    of twice as many. A message is so small that each member reduces everything, one round after the other.
    """

    reaches_all = True

    def __init__(self, context: EngineContext, group: Group) -> None:
        steps = [1 << power for power in range((group.size - 1).bit_length())]
        targets = [(group.rank + step) % group.size for step in steps]
        sources = [(group.rank - step) % group.size for step in steps]
        super().__init__(context, group, targets, sources, _PURPOSE)
        self.slot_bytes = room(context, group.size)

    def run(self, rounds: Iterator[Round], head: Head | None) -> Program:
        """Run one round, and compare the heads, if the ranks haven't agreed on the call."""
        for exchange in rounds:
            assert head is not None
            values = self._values(exchange)
            row = _HEAD.pack(*head) + values.tobytes()
            if channel.compares(head):
                # Calls that differ may also differ in size, so a message to be compared has the
                # full length.
                row = row.ljust(_HEAD.size + self.slot_bytes, b"\0")
            rows = yield from self._gather(np.frombuffer(row, np.uint8))
            channel.require_same([_HEAD.unpack_from(row) for row in rows])
            if len(values):
                slots = rows[:, _HEAD.size : _HEAD.size + values.nbytes].copy()
                exchange.read_slots(slots.view(exchange.dtype), self.rank)

    def _values(self, exchange: Round) -> np.ndarray:
        """Return what this member publishes in a round, or zeros as long."""
        length = sum(end - start for start, end in exchange.spans)
        values = np.zeros(length, exchange.dtype)
        if values.nbytes > self.slot_bytes:
            raise AssertionError(
                f"{values.nbytes} bytes don't fit into a message; agreed_engine.route_of is wrong"
            )
        if exchange.source is not None:
            exchange.fill(values)
        return values

    def _gather(self, row: np.ndarray) -> Generator[SocketMessage, None, np.ndarray]:
        """Return all members' rows, uint8 of shape [size, n], given this member's; n is the same on all."""
        # The rows of this member, of the one before it, and so on.
        rows = np.empty((self.size, len(row)), np.uint8)
        rows[0] = row
        sent = []
        distance = 1
        while distance < self.size:
            count = min(distance, self.size - distance)
            received = rows[distance : distance + count].reshape(-1)
            coming = self.receive((self.rank - distance) % self.size, received)
            passed_on = rows[:count].reshape(-1)
            sent.append(self.send((self.rank + distance) % self.size, passed_on))
            while not coming.Test():
                yield coming
            distance *= 2
        for message in sent:
            while not message.Test():
                yield message
        return rows[[(self.rank - member) % self.size for member in range(self.size)]]
