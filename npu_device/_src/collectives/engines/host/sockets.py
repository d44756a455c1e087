"""The connections of a group's members: two for each pair of them, one in each direction.

A message is its length and its bytes. The thread that waits for a message advances all messages of the channel: it
sends what the kernel takes, and receives what has come, so that members that send to each other at the same time never
wait for each other's buffers.
"""

from __future__ import annotations

import select
import socket
import struct
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from npu_device._src.cluster.peers import Peers
from npu_device._src.collectives.engines.host.queue import Program
from npu_device._src.collectives.group import Group, counts_of
from npu_device._src.collectives.job import Job

_LENGTH = struct.Struct("<Q")
_CHECK_SECONDS = 0.1
_SPIN_SECONDS = 1e-4
_ARRIVAL_SECONDS = 0.001  # nothing tells that a connection has come
_SLICE_SECONDS, _BRIEFLY_SECONDS = 0.005, 0.001


class _Message:
    """One message on its way."""

    def __init__(self, line: _Line, data: np.ndarray) -> None:
        self._line = line
        self.data = data.data
        self.ended = False

    def Test(self) -> bool:
        """Advance the messages of its connection; return whether this one has ended."""
        if not self.ended:
            self._line.advance()
        return self.ended


class _Line:
    """One direction of a pair: its messages, in their order.

    Attributes:
        lost: why the connection has ended; None while it hasn't. That is an error only for those who still wait for a
            message: the other member may have destroyed the group after its last one.
    """

    events = 0

    def __init__(self, peers: Peers, rank: int, number: int) -> None:
        self._peers, self._rank, self._number = peers, rank, number
        self.connection: socket.socket | None = None
        self.messages: deque[_Message] = deque()
        self.lost: str | None = None

    def add(self, data: np.ndarray) -> _Message:
        """Start a message."""
        message = _Message(self, data)
        self.messages.append(message)
        return message

    def advance(self) -> None:
        """Send or receive what is possible without waiting."""
        if self.connection is None:
            self.connection = self._connected()
        try:
            while self.messages and self.connection is not None and self.lost is None:
                self._move(self.connection, self.messages[0])
        except BlockingIOError:
            pass
        except OSError as error:
            self.lost = str(error)

    def check(self) -> None:
        """Check that messages can still come or go.

        Raises:
            PeerError: the connection has ended.
        """
        if self.lost is not None:
            self._peers.raise_for(self._rank, self.lost)

    def _connected(self) -> socket.socket | None:
        raise NotImplementedError

    def _move(self, connection: socket.socket, message: _Message) -> None:
        raise NotImplementedError

    def _end_first(self) -> None:
        self.messages.popleft().ended = True


class _Outgoing(_Line):
    events = select.POLLOUT

    def __init__(self, peers: Peers, rank: int, number: int) -> None:
        super().__init__(peers, rank, number)
        self._left: list[memoryview] = []

    def _connected(self) -> socket.socket | None:
        return self._peers.connect(self._rank, self._number)

    def _move(self, connection: socket.socket, message: _Message) -> None:
        self._left = self._left or [memoryview(_LENGTH.pack(message.data.nbytes)), message.data]
        sent = connection.sendmsg(self._left)
        while self._left and sent >= self._left[0].nbytes:
            sent -= self._left.pop(0).nbytes
        if self._left:
            self._left[0] = self._left[0][sent:]
        else:
            self._end_first()


class _Incoming(_Line):
    events = select.POLLIN

    def __init__(self, peers: Peers, rank: int, number: int) -> None:
        super().__init__(peers, rank, number)
        self._length = bytearray(_LENGTH.size)
        self._left = memoryview(self._length)
        self._in_data = False

    def _connected(self) -> socket.socket | None:
        return self._peers.accepted(self._rank, self._number)

    def _move(self, connection: socket.socket, message: _Message) -> None:
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
            if length > message.data.nbytes:
                raise AssertionError(
                    f"rank {self._rank} has sent {length} bytes where this rank expected {message.data.nbytes}.\n"
                    "What to do: start the job again, and report this as a bug of npu_device."
                )
            self._left = message.data[:length]
        else:
            self._left = memoryview(self._length)
            self._end_first()


class SocketMesh:
    """One member's end.

    Args:
        job: the job.
        group: the members.

    Attributes:
        size: number of members.
        rank: this member's number.
        counts: for each member, the number of ranks whose sum it contributes.
        ahead: see ``exchange.Channel``.
    """

    ahead = 4

    def __init__(self, job: Job, group: Group) -> None:
        self.size, self.rank = group.size, group.rank
        self.counts = counts_of(group)
        self._health = job.health
        self._spins = job.has_own_core
        ends = [(job.peers, rank, group.number) for rank in group.ranks]
        self._outgoing = [_Outgoing(*end) for end in ends]
        self._incoming = [_Incoming(*end) for end in ends]

    def send(self, member: int, data: np.ndarray) -> _Message:
        """Start to send bytes to a member; as many as the kernel takes leave at once."""
        line = self._outgoing[member]
        message = line.add(data)
        line.advance()
        return message

    def receive(self, member: int, data: np.ndarray) -> _Message:
        """Start to receive the next message of a member."""
        return self._incoming[member].add(data)

    def advance(self, program: Program, block: bool, hurry: bool = False) -> bool:
        """Run a program to its end, or as far as it goes without blocking; return whether it has ended.

        Raises:
            PeerError: a rank of the job has failed or ended, or can't be reached any more.
        """
        for message in program:
            if not block:
                return False
            spins = hurry and self._spins  # for the first news of a message: those of a slow link come later anyway
            while not message.ended:
                if not self._wait(_CHECK_SECONDS, spins):
                    self.check()
                spins = False
        return True

    def wait(self, first: bool, briefly: bool) -> bool:
        """Wait for news of any message, spinning briefly if it is the first wait, but not for long."""
        return self._wait(_BRIEFLY_SECONDS if briefly else _SLICE_SECONDS, first and self._spins)

    def _wait(self, seconds: float, spins: bool) -> bool:
        """Wait until some message can proceed, and advance it; return False if none can in so many seconds."""
        poll, busy, until = select.poll(), {}, time.perf_counter() + _SPIN_SECONDS
        for line in (*self._outgoing, *self._incoming):
            if line.messages and line.connection is None:
                seconds = min(seconds, _ARRIVAL_SECONDS)
                line.advance()
            if line.messages and line.connection is not None and line.lost is None:
                poll.register(line.connection, line.events)
                busy[line.connection.fileno()] = line
        ready = poll.poll(0)
        while spins and not ready and time.perf_counter() < until:
            ready = poll.poll(0)
        ready = ready or poll.poll(1000 * seconds)
        for descriptor, _ in ready:
            busy[descriptor].advance()
        return bool(ready)

    def check(self) -> None:
        """Check that the messages can still come or go.

        Raises:
            PeerError: a rank of the job has failed or ended, or can't be reached any more.
        """
        self._health.require_running()
        for line in (*self._outgoing, *self._incoming):
            if line.messages:
                line.check()

    def settle(self) -> None:
        """Do nothing: what the members share is no secret to be withdrawn."""

    def close(self, expected: Sequence[Any] = ()) -> None:
        """Close the connections."""
        del expected
        for line in (*self._outgoing, *self._incoming):
            if line.connection is not None:
                line.connection.close()
