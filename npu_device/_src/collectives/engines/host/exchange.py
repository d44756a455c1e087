"""Rounds over messages: each member sends every reader what that one reads. What sockets and MPI share.

All members start the same messages in the same order, so that a message needs no name.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np

from npu_device._src.collectives.engines.host.programs import Round
from npu_device._src.collectives.engines.host.queue import BufferPool, Head, Program

_PART_BYTES = 512 << 10  # a member's part of a slot, so that it stays in the cache (docs/notes.md)
_MOST_SLOT_BYTES = 8 << 20


class MessageChannel:
    """A channel whose members send messages to each other; see ``queue.Channel``."""

    reaches_all = False
    ahead = 4

    def __init__(self, size: int, rank: int, counts: tuple[int, ...], buffers: BufferPool) -> None:
        self.size, self.rank, self.counts, self.buffers = size, rank, counts, buffers
        self.slot_bytes = min(_MOST_SLOT_BYTES, size * _PART_BYTES)

    def send(self, member: int, data: np.ndarray) -> Any:
        """Start to send bytes to a member: uint8, shape [n]. They must stay as they are until the message has ended.

        As in mpi4py, ``Test()`` advances a message without waiting, and returns whether it has ended.
        """
        raise NotImplementedError

    def receive(self, member: int, data: np.ndarray) -> Any:
        """Start to receive the next message of a member: uint8, shape [n], as many as it has sent."""
        raise NotImplementedError

    def settle(self) -> None:
        """Do nothing: what the members share is no secret to be withdrawn."""

    def run(self, rounds: Iterator[Round], head: Head | None) -> Program:
        """Run rounds, of which several are on their way. The members have agreed on the call: there is no head."""
        del head
        under_way: deque[tuple[list[Any], Round, Any]] = deque()
        number = 0  # of rounds that have been read
        upcoming = next(rounds, None)
        while upcoming is not None or under_way:
            if upcoming is not None and len(under_way) <= self.ahead and upcoming.after <= number:
                under_way.append(self._start(upcoming))
                upcoming = next(rounds, None)
                continue
            messages, one, rows = under_way.popleft()
            for message in messages:
                while not message.Test():
                    yield message
            one.read(rows)
            number += 1

    def _start(self, one: Round) -> tuple[list[Any], Round, Any]:
        """Start a round's messages, but empty ones; return them, the round, and where its values will be."""
        messages, rows = [], dict(one.targets)
        others = [(self.rank + step) % self.size for step in range(1, self.size)]  # not all begin with the same one
        if one.readers is None or self.rank in one.readers:
            first, last = one.span(self.rank)
            for member in others if not one.targets else ():
                if member in one.publishers:
                    rows[member] = self.buffers.array((last - first,), one.dtype)
            messages = [self.receive(member, row.view(np.uint8)) for member, row in rows.items() if row.size]
            if one.source is not None and not one.targets:
                rows[self.rank] = one.source.part(first, last, self.buffers)
        if one.source is not None:
            whole = one.source.part(*one.spans[0], self.buffers) if len(one.spans) == 1 else None
            for member in others if one.readers is None else [each for each in others if each in one.readers]:
                first, last = one.span(member)
                if first < last:
                    data = one.source.part(first, last, self.buffers) if whole is None else whole
                    messages.append(self.send(member, data.view(np.uint8)))
        return messages, one, [rows.get(member) for member in range(self.size)]
