"""The connections of a group's members: two for each pair of them, one in each direction.

A message is its length and its bytes. The thread that waits for a message advances all messages of the mesh: it
sends what the kernel takes, and receives what has come, so that members that send to each other at the same time never
wait for each other's buffers.

The connections are made in a thread of their own when the group's first operation starts, so that nothing else waits
for them; operations do not proceed before.
"""

from __future__ import annotations

import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Callable

import numpy as np

from npu_device._src.cluster.peers import Peers
from npu_device._src.cluster.time_limits import CHECK_SECONDS, SPIN_SECONDS
from npu_device._src.collectives.engines.host.exchange import MessageChannel
from npu_device._src.collectives.engines.host.queue import Program, Wait
from npu_device._src.collectives.group import Group, counts_of
from npu_device._src.collectives.job import Job

_LENGTH = struct.Struct("<Q")


class SocketMessage:
    """One message on its way."""

    def __init__(self, wire: Wire, data: np.ndarray) -> None:
        self._wire = wire
        self.data = data.data
        self.ended = False

    def Test(self) -> bool:
        """Advance the messages of its connection; return whether this one has ended."""
        if not self.ended:
            self._wire.advance()
        return self.ended


class Wire:
    """One direction between two ranks: its connection, and its messages in their order.

    Args:
        poll: knows the connection while messages are on their way.
        peers: the ranks' own connections.
        rank: the other rank.

    Attributes:
        connection: set once, before the first message; doesn't block.
        lost: why the connection has ended; None while it hasn't. That is an error only for those who still wait for a
            message: the other member may have destroyed the group after its last one.
    """

    event = 0

    def __init__(self, poll: Busy, peers: Peers, rank: int) -> None:
        self._busy, self._peers, self._rank = poll, peers, rank
        self.connection: socket.socket
        self.messages: deque[SocketMessage] = deque()
        self.lost: str | None = None

    def add(self, data: np.ndarray) -> SocketMessage:
        """Start a message; as much as the kernel takes leaves at once."""
        message = SocketMessage(self, data)
        self.messages.append(message)
        if self.event == select.POLLOUT:
            self.advance()
        if not message.ended and self.lost is None:
            self._busy.add(self)
        return message

    def advance(self) -> None:
        """Send or receive what is possible without waiting."""
        try:
            while self.messages and self.lost is None:
                self._move(self.connection, self.messages[0])
        except BlockingIOError:
            return
        except OSError as error:
            self.lost = str(error)
        self._busy.remove(self)

    def check(self) -> None:
        """Check that messages can still come or go.

        Raises:
            PeerError: the connection has ended.
        """
        if self.lost is not None and self.messages:
            self._peers.raise_for(self._rank, self.lost)

    def _move(self, connection: socket.socket, message: SocketMessage) -> None:
        raise NotImplementedError


class _Outgoing(Wire):
    event = select.POLLOUT

    def __init__(self, poll: Busy, peers: Peers, rank: int) -> None:
        super().__init__(poll, peers, rank)
        self._left: list[memoryview] = []

    def _move(self, connection: socket.socket, message: SocketMessage) -> None:
        self._left = self._left or [memoryview(_LENGTH.pack(message.data.nbytes)), message.data]
        sent = connection.sendmsg(self._left)
        while self._left and sent >= self._left[0].nbytes:
            sent -= self._left.pop(0).nbytes
        if self._left:
            self._left[0] = self._left[0][sent:]
        else:
            self.messages.popleft().ended = True


class _Incoming(Wire):
    event = select.POLLIN

    def __init__(self, poll: Busy, peers: Peers, rank: int) -> None:
        super().__init__(poll, peers, rank)
        self._length = bytearray(_LENGTH.size)
        self._left = memoryview(self._length)
        self._in_data = False

    def _move(self, connection: socket.socket, message: SocketMessage) -> None:
        if self._left.nbytes:
            received = connection.recv_into(self._left)
            if not received:
                raise ConnectionError("it has closed its connection")
            self._left = self._left[received:]
        if self._left.nbytes:
            return
        self._in_data = not self._in_data
        if self._in_data:
            [length] = _LENGTH.unpack(self._length)
            if length != message.data.nbytes:
                raise AssertionError(
                    f"rank {self._rank} has sent {length} bytes where this rank expected {message.data.nbytes}.\n"
                    "What to do: start the job again, and report this as a bug of npu_device."
                )
            self._left = message.data
        else:
            self._left = memoryview(self._length)
            self.messages.popleft().ended = True


class Busy:
    """The wires on which messages are on their way, and waiting for one of them."""

    def __init__(self) -> None:
        self._poll = select.poll()
        self._wires: dict[int, Wire] = {}

    def add(self, wire: Wire) -> None:
        """Add a wire, if it isn't there."""
        number = wire.connection.fileno()
        if number not in self._wires:
            self._wires[number] = wire
            self._poll.register(number, wire.event)

    def remove(self, wire: Wire) -> None:
        """Remove a wire, if it is there."""
        number = wire.connection.fileno()
        if self._wires.pop(number, None) is not None:
            self._poll.unregister(number)

    def advance(self, seconds: float, spins: bool) -> bool:
        """Wait until some message can proceed, spinning first, and advance it; return False if none can in time."""
        until = time.perf_counter() + SPIN_SECONDS
        ready = self._poll.poll(0)
        while spins and not ready and time.perf_counter() < until:
            ready = self._poll.poll(0)
        ready = ready or self._poll.poll(1000 * seconds)
        for number, _ in ready:
            self._wires[number].advance()
        return bool(ready)


class SocketMesh(MessageChannel):
    """One member's end.

    Args:
        job: the job.
        group: the members.
        to: the members to which this one sends; all others by default.
        source: the members from which it receives.
        purpose: tells the connections of a group's meshes apart.
    """

    def __init__(
        self,
        job: Job,
        group: Group,
        to: Sequence[int] | None = None,
        source: Sequence[int] | None = None,
        purpose: int = 0,
    ) -> None:
        super().__init__(group.size, group.rank, counts_of(group), job.buffers)
        self._peers, self._health, self._ranks = job.peers, job.health, group.ranks
        self._number = group.number ^ purpose
        self._spins = job.has_own_core
        self._busy = Busy()
        others = [(self.rank + step) % self.size for step in range(1, self.size)]
        to, source = others if to is None else to, others if source is None else source
        self._outgoing = {member: _Outgoing(self._busy, job.peers, group.ranks[member]) for member in to}
        self._incoming = {member: _Incoming(self._busy, job.peers, group.ranks[member]) for member in source}
        self._connected = threading.Event()
        self._problem: BaseException | None = None
        self._closing = threading.Lock()
        self._closed = False
        threading.Thread(target=self._connect, name="npu_device-connect", daemon=True).start()

    def _connect(self) -> None:
        """Connect to the members, and wait until they have connected to this one."""
        try:
            wire: Wire
            for member, wire in self._outgoing.items():
                self._hold(wire, partial(self._peers.connect, self._ranks[member], self._number))
            for member, wire in self._incoming.items():
                self._hold(wire, partial(self._peers.accept, self._ranks[member], self._number, self._is_closed))
        except BaseException as error:
            self._problem = error
        self._connected.set()

    def _hold(self, wire: Wire, connect: Callable[[], socket.socket | None]) -> None:
        connection = None if self._closed else connect()
        with self._closing:
            if connection is not None:
                wire.connection = connection
                if self._closed:
                    connection.close()

    @property
    def _wires(self) -> list[Wire]:
        return [*self._outgoing.values(), *self._incoming.values()]

    def _is_closed(self) -> bool:
        return self._closed

    def send(self, member: int, data: np.ndarray) -> SocketMessage:
        """Start to send bytes to a member; as many as the kernel takes leave at once."""
        return self._outgoing[member].add(data)

    def receive(self, member: int, data: np.ndarray) -> SocketMessage:
        """Start to receive the next message of a member, which has as many bytes."""
        return self._incoming[member].add(data)

    def advance(self, program: Program, wait: Wait) -> bool:
        """Run a program to its end, or as far as it goes without blocking; return whether it has ended.

        Raises:
            PeerError: a rank of the job has failed or ended, or can't be reached any more.
        """
        while not self._is_connected(0 if wait is Wait.NOT else CHECK_SECONDS):
            if wait is Wait.NOT:
                return False
        for message in program:
            if wait is Wait.NOT:
                return False
            spins = wait is Wait.SPINNING and self._spins
            # Only for the first news of a message: those of a slow link come later anyway.
            while not message.ended:
                if not self._busy.advance(CHECK_SECONDS, spins):
                    self._check()
                spins = False
        return True

    def _is_connected(self, seconds: float) -> bool:
        """Wait until the connections are there; return False if that takes longer.

        Raises:
            PeerError: a rank of the job has failed or ended, or can't be reached.
        """
        if not self._connected.is_set():
            self._health.require_running()
            if not self._connected.wait(seconds):
                return False
        if self._problem is not None:
            raise self._problem
        return True

    def _check(self) -> None:
        """Check that the messages can still come or go.

        Raises:
            PeerError: a rank of the job has failed or ended, or can't be reached any more.
        """
        self._health.require_running()
        for wire in self._wires:
            wire.check()

    def close(self) -> None:
        """Close the connections."""
        with self._closing:
            self._closed = True
            for wire in self._wires:
                if hasattr(wire, "connection"):
                    wire.connection.close()
