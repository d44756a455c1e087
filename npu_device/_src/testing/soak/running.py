"""The processes of a launcher on this machine; the ranks are children with the environment of a rank. Linux only."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

from npu_device._src.testing.leaks import children_of


@dataclass(frozen=True)
class Rank:
    """A running rank; ``hub`` is the port of the hub of the attempt."""

    pid: int
    rank: int
    attempt: int
    hub: int


def ranks_of(launcher: int) -> list[Rank]:
    found = []
    for pid in children_of(launcher):
        with contextlib.suppress(OSError, KeyError, ValueError):
            environment = _environment(pid)
            numbers = (
                environment[name]
                for name in ("RANK_ID", "NPU_DEVICE_RESTART_COUNT", "NPU_DEVICE_HUB")
            )
            found.append(Rank(pid, *map(int, numbers)))
    return sorted(found, key=lambda rank: rank.rank)


def _environment(pid: int) -> dict[str, str]:
    entries = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)
