"""The immutable description of the job on which all ranks have agreed. ``rendezvous`` makes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Cluster:
    """The ranks of the job, as each of them knows it.

    Attributes:
        rank: this process's rank, 0 to world_size - 1.
        world_size: number of ranks.
        local_rank: this process's index among the ranks of its host, from 0.
        local_size: number of ranks on its host.
        host: this process's host, as the scheme names it.
        device_id: number of this process's device on its host.
        hosts: host of each rank, as the scheme names it (server_id, IP address or host name); equal names: one host.
        addresses: address of each rank, as the others reach it.
        job_id: name of the job.
    """

    rank: int
    world_size: int
    local_rank: int
    local_size: int
    host: str
    device_id: int
    hosts: tuple[str, ...]
    addresses: tuple[str, ...]
    job_id: str

    @classmethod
    def seen_by(cls, rank: int, device_id: int, hosts: Sequence[str], addresses: Sequence[str], job_id: str) -> Cluster:
        """Return the description for one rank; local ranks and sizes follow from ``hosts``."""
        neighbours = [other for other, host in enumerate(hosts) if host == hosts[rank]]
        return cls(
            rank=rank,
            world_size=len(hosts),
            local_rank=neighbours.index(rank),
            local_size=len(neighbours),
            host=hosts[rank],
            device_id=device_id,
            hosts=tuple(hosts),
            addresses=tuple(addresses),
            job_id=job_id,
        )


def join_address(host: str, port: int) -> str:
    """Return ``host:port``, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
