"""The processes of a launcher on this machine; its ranks are its children with a rank's environment. Linux only."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Rank:
    """A running rank.

    Attributes:
        pid: its process.
        rank: its number.
        attempt: how often the job has been started again.
        hub: port of the attempt's hub.
    """

    pid: int
    rank: int
    attempt: int
    hub: int


def ranks_of(launcher: int) -> list[Rank]:
    """Return the running ranks of a launcher, by rank."""
    found = []
    for pid in children_of(launcher):
        with contextlib.suppress(OSError, KeyError, ValueError):
            environment = _environment(pid)
            numbers = (environment[name] for name in ("RANK_ID", "NPU_DEVICE_RESTART_COUNT", "NPU_DEVICE_HUB"))
            found.append(Rank(pid, *map(int, numbers)))
    return sorted(found, key=lambda rank: rank.rank)


def children_of(pid: int) -> Iterator[int]:
    """Return the running children of a process."""
    for entry in os.listdir("/proc"):
        if entry.isdecimal() and _parent(int(entry)) == pid:
            yield int(entry)


def _parent(pid: int) -> int | None:
    """Return the parent of a process that hasn't ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[1])


def _environment(pid: int) -> dict[str, str]:
    entries = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)
