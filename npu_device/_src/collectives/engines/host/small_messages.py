"""The connection of a group's members: rounds in which each one sends to one other, and knows of twice as many."""

from __future__ import annotations

from collections.abc import Generator

from npu_device._src.collectives.engines.host.queue import Program
from npu_device._src.collectives.group import Group
from npu_device._src.collectives.job import Job


class SmallMessages:
    """One member's end.

    Args:
        job: the job.
        group: the members.

    Attributes:
        size: number of members.
        rank: this member's number.
    """

    def __init__(self, job: Job, group: Group) -> None:
        self.size, self.rank = group.size, group.rank
        self._peers, self._ranks = job.peers, group.ranks
        self._number = group.number
        self._inbox = self._peers.inbox(self._number)
        self._spins = job.has_own_core

    def gather(self, row: bytes) -> Generator[int, None, list[bytes]]:
        """Return all members' rows, by member, given this member's; they have the same length on all."""
        known = [row]  # of this member, the one before it, and so on
        while len(known) < self.size:
            distance = len(known)
            to, source = (self._ranks[(self.rank + step) % self.size] for step in (distance, -distance))
            self._peers.send(to, self._number, b"".join(known[: self.size - distance]))
            while self._inbox.first(source) is None:
                yield source
            message = self._inbox.take(source)
            known += [message[first : first + len(row)] for first in range(0, len(message), len(row))]
        return [known[(self.rank - member) % self.size] for member in range(self.size)]

    def advance(self, program: Program, block: bool, hurry: bool = False) -> bool:
        """Run a program to its end, or as far as it goes without blocking; return whether it has ended.

        A paused program yields the rank whose message it needs. The next call resumes it.

        Raises:
            PeerError: a rank of the job has failed or ended, or can't be reached any more.
        """
        for source in program:
            if not block:
                return False
            self._peers.wait(self._inbox, source, hurry and self._spins)
        return True

    def settle(self) -> None:
        """Do nothing: what the members share is no secret to be withdrawn."""

    def close(self) -> None:
        """Give up the inbox."""
        self._peers.forget(self._number)
