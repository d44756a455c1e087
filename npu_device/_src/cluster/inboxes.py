"""Messages that other ranks have sent to this one: how they come out of a connection, and where they wait."""

from __future__ import annotations

import select
import socket
import struct
import threading
import time
from collections import defaultdict, deque
from typing import Callable

HEADER = struct.Struct("<QI")
"""Of a message: number of the inbox; length in bytes."""

_SPIN_SECONDS = 1e-4
_READ_BYTES = 64 << 10  # malloc would ask the system for larger ones each time
_LONGEST_MESSAGE = 1 << 26  # bytes
_OVERHEAD = 200  # bytes that Python takes for a message


class Inbox:
    """Messages that have arrived on this rank, in the order of each sender.

    Args:
        unread: counts the bytes of each rank that nobody has taken yet, in all inboxes.
    """

    def __init__(self, unread: defaultdict[int, int]) -> None:
        self._unread = unread
        self._changed = threading.Condition()
        self._messages: defaultdict[int, deque[bytes]] = defaultdict(deque)
        self._waiting = 0
        self.news = 0

    def put(self, rank: int, message: bytes) -> None:
        """Add a message from a rank."""
        self._messages[rank].append(message)
        self._unread[rank] += len(message) + _OVERHEAD
        self.news += 1
        self.wake()

    @property
    def is_empty(self) -> bool:
        """Return True when there is no message of any rank."""
        return not any(self._messages.values())

    def first(self, rank: int) -> bytes | None:
        """Return the oldest message from a rank; None if there is none."""
        messages = self._messages[rank]
        return messages[0] if messages else None

    def take(self, rank: int) -> bytes:
        """Remove the oldest message from a rank, and return it."""
        message = self._messages[rank].popleft()
        self._unread[rank] -= len(message) + _OVERHEAD
        return message

    def wake(self) -> None:
        """Let waiting threads look again."""
        if self._waiting:
            with self._changed:
                self._changed.notify_all()

    def wait(self, seen: int, ready: Callable[[], bool], seconds: float) -> bool:
        """Wait for another message than ``seen`` ones, or until something is ready; return False if neither came."""
        with self._changed:
            self._waiting += 1
            try:
                return self._changed.wait_for(lambda: self.news != seen or ready(), seconds)
            finally:
                self._waiting -= 1


class Incoming:
    """A connection on which another rank sends.

    Attributes:
        reading: held by the thread that reads.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.reading = threading.Lock()
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)
        self._data = bytearray()

    def read(self, seconds: float, spins: bool) -> list[tuple[int, bytes]]:
        """Return the messages that arrive in so many seconds, or at once those that have arrived: inbox and content.

        Raises:
            OSError: the connection has ended.
        """
        if not (spins and self._arrives_soon()) and not self._poll.poll(1000 * seconds):
            return []
        data = self.connection.recv(_READ_BYTES)
        if not data:
            raise ConnectionError("it has closed its connection")
        self._data += data
        messages = []
        while len(self._data) >= HEADER.size:
            number, length = HEADER.unpack_from(self._data)
            if length > _LONGEST_MESSAGE:
                raise ConnectionError(f"it has sent a message of {length} bytes")
            end = HEADER.size + length
            if len(self._data) < end:
                break
            messages.append((number, bytes(self._data[HEADER.size : end])))
            del self._data[:end]
        return messages

    def _arrives_soon(self) -> bool:
        until = time.perf_counter() + _SPIN_SECONDS
        while not self._poll.poll(0):
            if time.perf_counter() > until:
                return False
        return True
