"""The slots of a mailbox as messages between two ranks."""

from __future__ import annotations

from collections import deque

import numpy as np

from npu_device._src.collectives.engines.host.exchange import Channel, Request
from npu_device._src.collectives.engines.host.mailbox import SLOT_BYTES, SLOTS, Slots


class TransferSlots(Slots):
    """One side's end. A message wakes the other side, and a thread waits only briefly.

    Args:
        channel: the connection of the two.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._other = 1 - channel.rank
        self._free = [np.empty(SLOT_BYTES, np.uint8) for _ in range(SLOTS)]
        self._sent: deque[tuple[Request, np.ndarray]] = deque()
        self._coming: deque[tuple[Request, np.ndarray]] = deque()
        self._has_met = False

    def look(self) -> None:
        """Meet the other side, if that isn't done yet, and be ready for its messages."""
        self._has_met = self._channel.advance(iter(()), block=False)
        while self._has_met and len(self._coming) < SLOTS:
            self._expect(np.empty(SLOT_BYTES, np.uint8))

    def arrived(self) -> np.ndarray | None:
        """Return the next message of the other side."""
        return self._coming[0][1] if self._coming and self._coming[0][0].Test() else None

    def emptied(self) -> None:
        """Be ready for another message."""
        self._expect(self._coming.popleft()[1])

    def free(self) -> np.ndarray | None:
        """Return memory that has been sent, or never used."""
        while self._sent and self._sent[0][0].Test():
            self._free.append(self._sent.popleft()[1])
        return self._free[-1] if self._has_met and self._free else None

    def filled(self, size: int) -> None:
        """Send the message."""
        slot = self._free.pop()
        self._sent.append((self._channel.send(self._other, slot[:size]), slot))

    def check(self) -> None:
        """Raise if the job has failed."""
        self._channel.check()

    def wait(self, first: bool, briefly: bool) -> bool:
        """Wait for something new, but not for long."""
        return self._channel.wait(first, briefly)

    def close(self) -> None:
        """Expect no more messages."""
        self._channel.close([request for request, _ in self._coming])
        self._coming.clear()

    def _expect(self, slot: np.ndarray) -> None:
        self._coming.append((self._channel.receive(self._other, slot), slot))
