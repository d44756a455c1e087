"""The slots of a mailbox in shared memory: each side has a ring of them, which it fills and the other side empties."""

from __future__ import annotations

import numpy as np

from npu_device._src.collectives.engines.host.futex import Counter
from npu_device._src.collectives.engines.host.mailbox import SLOT_BYTES, SLOTS, Slots
from npu_device._src.collectives.engines.host.memory_offer import FIRST_BYTE, Segment

_COUNTER_BYTES = 64
_RINGS_AT = 4096
_LOOKS = 200  # about 40 µs

BYTES = _RINGS_AT + 2 * SLOTS * SLOT_BYTES
"""Size of the memory."""


class MemorySlots(Slots):
    """One side's end.

    Args:
        segment: ``BYTES`` bytes that the two share, zeros when the first side comes.
        side: 0 or 1.
    """

    def __init__(self, segment: Segment, side: int) -> None:
        other = 1 - side
        self._segment = segment

        def counter(place: int) -> Counter:
            return Counter(segment.memory, FIRST_BYTE + place * _COUNTER_BYTES)

        self._filled, self._others_filled = counter(side), counter(other)
        self._emptied, self._others_emptied = counter(2 + side), counter(2 + other)
        self._news, self._others_news = counter(4 + side), counter(4 + other)
        rings = np.frombuffer(segment.memory, np.uint8, 2 * SLOTS * SLOT_BYTES, FIRST_BYTE + _RINGS_AT)
        rings = rings.reshape(2, SLOTS, SLOT_BYTES)
        self._ring, self._others_ring = rings[side], rings[other]
        self._slots_filled = self._slots_emptied = self._news_told = self._news_seen = 0

    def look(self) -> None:
        """Note what there is now."""
        self._news_seen = self._others_news.read()

    def arrived(self) -> np.ndarray | None:
        """Return the next slot that the other side has filled."""
        if not self._others_filled.has_reached(self._slots_emptied + 1):
            return None
        return self._others_ring[self._slots_emptied % SLOTS]

    def emptied(self) -> None:
        """Let the other side fill the slot again."""
        self._slots_emptied += 1
        self._emptied.advance_to(self._slots_emptied)

    def free(self) -> np.ndarray | None:
        """Return a slot that the other side has emptied."""
        if not self._others_emptied.has_reached(self._slots_filled + 1 - SLOTS):
            return None
        return self._ring[self._slots_filled % SLOTS]

    def filled(self, size: int) -> None:
        """Let the other side read the slot."""
        del size
        self._slots_filled += 1
        self._filled.advance_to(self._slots_filled)

    def tell(self) -> None:
        """Wake the other side."""
        self._news_told += 1
        self._news.advance_to(self._news_told)

    def wake(self) -> None:
        """Wake this side's waiting thread."""
        self._others_news.wake()

    def wait(self, first: bool, briefly: bool) -> bool:
        """Spin briefly if it is the first wait, then sleep until there is news, for at most a slice of time."""
        return self._others_news.wait_for(self._news_seen + 1, _LOOKS if first else 0, briefly)

    def check(self) -> None:
        """Raise if the collectives of this rank have been stopped."""
        self._segment.check()

    def settle(self) -> None:
        """Withdraw the offer of the memory."""
        self._segment.settle()
