"""A process as a cluster's launcher describes it: its place among the others, and where they meet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Optional


@dataclass(frozen=True)
class Launched:
    """The place of this process in the job, as the variables of the launcher give it.

    Attributes:
        launcher: the launcher's name.
        variable: name of the variable that holds the rank, for messages.
        size: number of ranks, 1 or more.
        rank: this process's rank.
        local_rank: its number among the ranks of its host; None if unknown.
        on_one_host: True if all ranks are known to be on this host.
        node: the launcher's name of this host; "" if it has none.
        job: text that only the ranks of this job share; "" if there is none.
        address: address or name of rank 0's host; "" if unknown.
        port: port at which the ranks meet there; None if the launcher names none.
    """

    launcher: str
    variable: str
    size: int
    rank: int
    local_rank: int | None
    on_one_host: bool
    node: str = ""
    job: str = ""
    address: str = ""
    port: int | None = None

    def __str__(self) -> str:
        """Return the place for messages."""
        return f"rank {self.rank} of {self.size} ({self.launcher}: {self.variable}={self.rank})"


class RendezvousAddress(NamedTuple):
    """The address at which the ranks meet.

    Attributes:
        hosts: addresses and names of rank 0's host, in the order in which they are tried.
        port: a port there; None if the ranks compute it.
        secret: a secret for a job that has none.
    """

    hosts: tuple[str, ...]
    port: Optional[int]
    secret: bytes = b""
