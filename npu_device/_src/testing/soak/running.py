"""The processes of a launcher on this machine; the ranks are children with the environment of a rank. Linux only."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

from npu_device._src.testing.leaks import children_of


@dataclass(frozen=True)
class Rank:
    """A running rank; ``size`` is the number of ranks of the attempt, ``hub`` the port of its hub."""

    pid: int
    rank: int
    size: int
    attempt: int
    hub: int


def ranks_of(launcher: int) -> list[Rank]:
    ranks = []
    for pid in children_of(launcher):
        # Other children of the launcher, such as its guard, have no such variables.
        with contextlib.suppress(OSError, KeyError, ValueError):
            environment = _environment(pid)
            rank = Rank(
                pid,
                rank=int(environment["RANK_ID"]),
                size=int(environment["RANK_SIZE"]),
                attempt=int(environment["NPU_DEVICE_RESTART_COUNT"]),
                hub=int(environment["NPU_DEVICE_HUB"]),
            )
            ranks.append(rank)
    return sorted(ranks, key=lambda rank: rank.rank)


def _environment(pid: int) -> dict[str, str]:
    variables = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    return dict(variable.split("=", 1) for variable in variables if "=" in variable)
