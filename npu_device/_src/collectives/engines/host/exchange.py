"""What a backend provides for these programs: messages between the members of a group."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np


class Request(Protocol):
    """One message that is sent or received, as mpi4py has it."""

    def Test(self) -> bool:
        """Advance the message without waiting; return whether it has ended."""


class Channel(Protocol):
    """One member's end.

    Attributes:
        size: number of members.
        rank: this member's number.
        counts: for each member, the number of ranks whose sum it contributes.
        ahead: chunks that are started before the first is waited for.
    """

    size: int
    rank: int
    counts: tuple[int, ...]
    ahead: int

    def send(self, member: int, data: np.ndarray) -> Request:
        """Start to send bytes to a member: uint8, shape [n]. They must stay as they are until the message has ended."""

    def receive(self, member: int, data: np.ndarray) -> Request:
        """Start to receive the next message of a member: uint8, shape [n], as many as it has sent."""

    def advance(self, program: Any, block: bool, hurry: bool = False) -> bool:
        """Run a program; see ``queue.Channel``. It yields the request to wait for."""

    def close(self) -> None:
        """Give up the channel."""
