"""The rounds over messages, for sockets and MPI: each member sends every reader what that one reads."""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple, Optional

import numpy as np

from npu_device._src.collectives.engines.context import EngineContext
from npu_device._src.collectives.engines.host.channel import (
    Channel,
    Head,
    Program,
    Round,
    Rounds,
    ignore,
)
from npu_device._src.collectives.group import Group, counts_of

# A member's share of a slot, small enough to stay in the cache (docs/notes.md).
_MEMBER_BYTES = 512 << 10
# A limit for many members, which would need buffers for a whole slot each, in every round under way.
_MOST_SLOT_BYTES = 8 << 20


class _StartedRound(NamedTuple):
    """A round on its way."""

    messages: list
    round: Round
    rows: list[Optional[np.ndarray]]  # memory for the values of each member


class MessageChannel(Channel):
    """A channel whose members send messages to each other; see ``channel.Channel``. All start the same messages in the
    same order, so that a message needs no name.
    """

    reaches_all = False
    ahead = 4

    def __init__(self, context: EngineContext, group: Group) -> None:
        super().__init__(group.size, group.rank, counts_of(group), context.buffers)
        self.slot_bytes = min(_MOST_SLOT_BYTES, group.size * _MEMBER_BYTES)
        self._health = context.health

    def send(self, member: int, data: np.ndarray) -> Any:
        """Start to send bytes to a member: uint8, shape [n]. They must stay as they are until the message has ended.

        As in mpi4py, ``Test()`` advances a message without waiting, and returns whether it has ended.
        """
        raise NotImplementedError

    def receive(self, member: int, data: np.ndarray) -> Any:
        """Start to receive the next message of a member: uint8, shape [n], as many as it has sent."""
        raise NotImplementedError

    def run(self, rounds: Rounds, head: Head | None) -> Program:
        """Run rounds, of which several are on their way. The members have agreed on the call before, without a head."""
        del head
        under_way = deque[_StartedRound]()
        rounds_read = 0
        upcoming = next(rounds, None)
        while upcoming is not None or under_way:
            # A round whose source comes from others waits until those have been read.
            is_free = len(under_way) <= self.ahead
            if upcoming is not None and is_free and upcoming.after <= rounds_read:
                under_way.append(self._start(upcoming))
                upcoming = next(rounds, None)
                continue
            started = under_way.popleft()
            for message in started.messages:
                while not message.Test():
                    yield message
            started.round.read(started.rows)
            rounds_read += 1

    def _start(self, exchange: Round) -> _StartedRound:
        """Start the messages of a round, but empty ones."""
        rows = self._rows(exchange)
        messages = []
        for member, row in rows.items():
            # All members skip empty messages alike, because spans are the same everywhere.
            if row.size:
                messages.append(self.receive(member, row.view(np.uint8)))
        source = exchange.source
        if source is not None:
            if exchange.read is not ignore and not exchange.targets:
                # A reduction reads the member's own values as it reads received ones.
                rows[self.rank] = source.slice(*exchange.span(self.rank), self.buffers)
            messages += self._send_all(exchange)
        return _StartedRound(messages, exchange, [rows.get(member) for member in range(self.size)])

    def _rows(self, exchange: Round) -> dict[int, np.ndarray]:
        """Return, by member, the arrays into which this member receives."""
        if exchange.readers is not None and self.rank not in exchange.readers:
            return {}
        if exchange.targets:
            return dict(exchange.targets)
        start, end = exchange.span(self.rank)
        senders = [
            member for member in self.other_members(self.rank) if member in exchange.publishers
        ]
        return {member: self.buffers.array((end - start,), exchange.dtype) for member in senders}

    def _send_all(self, exchange: Round) -> list:
        """Start to send each reader what it reads."""
        source = exchange.source
        assert source is not None
        common = None
        # All readers get the same, which is converted once.
        if len(exchange.spans) == 1:
            common = source.slice(*exchange.spans[0], self.buffers)
        messages = []
        for member in self.other_members(self.rank):
            start, end = exchange.span(member)
            if start < end and (exchange.readers is None or member in exchange.readers):
                sent = common
                if sent is None:
                    sent = source.slice(start, end, self.buffers)
                messages.append(self.send(member, sent.view(np.uint8)))
        return messages
