"""The slots of a mailbox as messages of MPI between two ranks."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import numpy as np

from npu_device._src.collectives.backends.arrays.mailbox import SLOT_BYTES, SLOTS, Slots
from npu_device._src.collectives.backends.mpi.channel import Channel, pause


class MpiSlots(Slots):
    """One side's end. A message wakes the other side, and a thread waits only briefly.

    Args:
        channel: the connection of the two.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._other = 1 - channel.rank
        self._free = [np.empty(SLOT_BYTES, np.uint8) for _ in range(SLOTS)]
        self._sent: deque[tuple[Any, np.ndarray]] = deque()
        self._coming: deque[tuple[Any, np.ndarray]] = deque()
        self._has_met = False
        self._since = 0.0

    def look(self) -> None:
        """Meet the other side, if that isn't done yet, and be ready for its messages."""
        self._has_met = self._channel.advance(iter(()), block=False)
        with self._channel.errors_explained():
            while self._has_met and len(self._coming) < SLOTS:
                self._expect(np.empty(SLOT_BYTES, np.uint8))

    def arrived(self) -> np.ndarray | None:
        """Return the next message of the other side."""
        with self._channel.errors_explained():
            return self._coming[0][1] if self._coming and self._coming[0][0].Test() else None

    def emptied(self) -> None:
        """Be ready for another message."""
        _, slot = self._coming.popleft()
        with self._channel.errors_explained():
            self._expect(slot)

    def free(self) -> np.ndarray | None:
        """Return memory that MPI has sent, or never used."""
        with self._channel.errors_explained():
            while self._sent and self._sent[0][0].Test():
                self._free.append(self._sent.popleft()[1])
        return self._free[-1] if self._has_met and self._free else None

    def filled(self, size: int) -> None:
        """Send the message."""
        slot = self._free.pop()
        with self._channel.errors_explained():
            self._sent.append((self._channel.comm.Isend(slot[:size], self._other), slot))

    def check(self) -> None:
        """Raise if the job has failed."""
        self._channel.check()

    def wait(self, first: bool, briefly: bool) -> bool:
        """Wait a moment, always briefly; there may be something new."""
        del briefly
        now = time.perf_counter()
        if first:
            self._since = now
        pause(now - self._since)
        return False

    def close(self) -> None:
        """Expect no more messages."""
        for request, _ in self._coming:
            request.Cancel()
            request.Wait()
        self._coming.clear()
        self._channel.close()

    def _expect(self, slot: np.ndarray) -> None:
        self._coming.append((self._channel.comm.Irecv(slot, self._other), slot))
