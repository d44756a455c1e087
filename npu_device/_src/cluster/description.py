"""A process's view of its job: its membership before the rendezvous, the cluster after it. Both are immutable."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from npu_device._src import environment


@dataclass(frozen=True)
class Membership:
    """The place of this process in the job, as far as the environment says it."""

    scheme: str  # "rank table", "CM_*", "TF_CONFIG" or the launcher's name
    world_size: int  # number of ranks, 2 or more
    rank: int | None  # this process's rank; None if the chief numbers the ranks (CM_*)
    # Address at which the others reach it; None for the local end of its connection to the chief.
    host: str | None
    host_key: str  # name of this process's host, by which ranks are grouped; "" for the address that the chief sees
    device_id: int  # number of this process's device on its host
    is_chief: bool  # True for the rank on whose host the others meet
    # Addresses or names of the chief's host, in the order in which they are tried.
    chief_hosts: tuple[str, ...]
    chief_port: int  # port on which the hub listens there
    # The hub refuses the ranks of a different job.
    job_id: str = field(default_factory=environment.JOB_ID.get)
    connect_timeout: float = field(default_factory=environment.HCCL_CONNECT_TIMEOUT.get)
    # Host of each rank if the scheme names it, else empty; for messages.
    expected_hosts: tuple[str, ...] = ()
    secret: bytes = field(default=b"", repr=False)
    # True if an ``mpiexec`` started the ranks. It kills all of them when one is killed.
    under_mpiexec: bool = False
    # The number of a process that has started this one, and may come as the rank itself.
    candidate: int | None = None

    @property
    def starts_hub(self) -> bool:
        """Return True if this rank starts the hub; under npurun it is already running."""
        return self.is_chief and environment.NPU_DEVICE_HUB.get() != self.chief_port


@dataclass(frozen=True)
class Cluster:
    """The ranks of the job, as each of them knows it."""

    rank: int
    device_id: int  # number of this process's device on its host
    # The host of each rank, as the scheme names it (server_id, IP address or name). Equal names are one host.
    hosts: tuple[str, ...]
    addresses: tuple[str, ...]  # address of each rank, as the others reach it
    job_id: str
    # Only ranks can have sent what comes from one: the job has a secret, or uses the loopback only.
    is_trusted: bool = False

    @cached_property
    def world_size(self) -> int:
        return len(self.hosts)

    @cached_property
    def host(self) -> str:
        """Return the name of this process's host."""
        return self.hosts[self.rank]

    @cached_property
    def neighbours(self) -> list[int]:
        """Return the ranks of this host, this one among them."""
        return [rank for rank, host in enumerate(self.hosts) if host == self.host]

    @cached_property
    def local_rank(self) -> int:
        """Return the index of this rank among those of its host."""
        return self.neighbours.index(self.rank)

    @property
    def local_size(self) -> int:
        return len(self.neighbours)

    @property
    def name(self) -> str:
        return self.name_of(self.rank)

    def as_parent(self, pid: int) -> ParentRank:
        """Return how a child of this process, of which the number is given, sees this rank."""
        return ParentRank(pid, self.rank, self.world_size, self.neighbours, self.device_id)

    def name_of(self, rank: int) -> str:
        """Return the name of a rank in messages: ``rank 1 on host node0``."""
        return f"rank {rank} on host {self.hosts[rank]}"

    def lines(self, texts: Mapping[int, str], limit: int = sys.maxsize) -> list[str]:
        """Return a line of a message for each rank that has a text, and one for those beyond the first ``limit``."""
        lines = [f"  {self.name_of(rank)}: {text}" for rank, text in texts.items()]
        if len(lines) > limit:
            lines[limit:] = [f"  and {len(lines) - limit} more ranks"]
        return lines


@dataclass(frozen=True)
class ParentRank:
    """The rank whose child this process is."""

    pid: int
    rank: int
    world_size: int
    neighbours: Sequence[int]  # the ranks of its host, itself among them
    device_id: int

    @property
    def local_rank(self) -> int:
        return self.neighbours.index(self.rank)

    @property
    def local_size(self) -> int:
        return len(self.neighbours)

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.world_size} (process {self.pid})"
