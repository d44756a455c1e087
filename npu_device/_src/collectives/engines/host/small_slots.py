"""The slots of a mailbox as messages between two ranks."""

from __future__ import annotations

import numpy as np

from npu_device._src.collectives.engines.host.mailbox import SLOT_BYTES, Slots
from npu_device._src.collectives.group import Group
from npu_device._src.collectives.job import Job

_SLICE_SECONDS = 0.005  # nothing wakes a thread that reads
_BRIEFLY_SECONDS = 0.001


class MessageSlots(Slots):
    """One side's end. A message wakes the other side, and a thread waits only briefly.

    Args:
        job: the job.
        pair: the two ranks.
    """

    def __init__(self, job: Job, pair: Group) -> None:
        self._peers, self._other, self._number = job.peers, pair.ranks[1 - pair.rank], pair.number
        self._inbox = self._peers.inbox(self._number)
        self._slot = np.empty(SLOT_BYTES, np.uint8)
        self._spins = job.has_own_core

    def look(self) -> None:
        """Read what there is now."""
        self._peers.read(self._inbox, self._other, 0.0)

    def arrived(self) -> np.ndarray | None:
        """Return the next message of the other side."""
        message = self._inbox.first(self._other)
        return None if message is None else np.frombuffer(message, np.uint8)

    def emptied(self) -> None:
        """Drop the message that has arrived."""
        self._inbox.take(self._other)

    def free(self) -> np.ndarray | None:
        """Return memory to be filled."""
        return self._slot

    def filled(self, size: int) -> None:
        """Send the message."""
        self._peers.send(self._other, self._number, self._slot[:size].tobytes())

    def wait(self, first: bool, briefly: bool) -> bool:
        """Wait for something new, spinning briefly if it is the first wait, but not for long; return False if nothing
        came.
        """
        seconds = _BRIEFLY_SECONDS if briefly else _SLICE_SECONDS
        return self._peers.read(self._inbox, self._other, seconds, first and self._spins)

    def check(self) -> None:
        """Check that the other side's messages can still come.

        Raises:
            PeerError: a rank of the job has failed or ended, or can't be reached any more.
        """
        self._peers.check(self._other)

    def close(self) -> None:
        """Give up the inbox."""
        self._peers.forget(self._number)
