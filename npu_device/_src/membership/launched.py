"""A process as the launcher of a cluster describes it: its place among the others, and where they meet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Optional


@dataclass(frozen=True)
class Launched:
    """The place of this process in the job, as the variables of the launcher give it."""

    launcher: str
    variable: str  # name of the variable that holds the rank, for messages
    size: int  # number of ranks, 1 or more
    rank: int
    local_rank: int | None  # its number among the ranks of its host; None if unknown
    on_one_host: bool  # True if all ranks are known to be on this host
    node: str = ""  # name that the launcher gives this host; "" if it has none
    job: str = ""  # text that only the ranks of this job share; "" if there is none
    address: str = ""  # address or name of the host of rank 0; "" if unknown
    port: int | None = None  # port at which the ranks meet there; None if the launcher names none

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.size} ({self.launcher}: {self.variable}={self.rank})"


class RendezvousAddress(NamedTuple):
    """The address at which the ranks meet."""

    hosts: tuple[str, ...]  # addresses and names of the host of rank 0, in the order in which they are tried
    port: Optional[int]  # a port there; None if the ranks compute it
    secret: bytes = b""  # a secret for a job that has none
