"""How much memory processes of this host or container may take."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import NamedTuple

from npu_device._src.machine.topology import groups_of


class _Names(NamedTuple):
    """The files of a control group that tell its memory, and the row of its cache in ``memory.stat``."""

    limit: str
    usage: str
    cache: str


_VERSION_1 = _Names("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_VERSION_2 = _Names("memory.max", "memory.current", "inactive_file")


def free_memory(root: Path = Path("/")) -> int | None:
    """Return the bytes that the host has, or a control group leaves, whichever is less; None if nothing tells it."""
    free = []
    with contextlib.suppress(OSError, KeyError, ValueError):
        kilobytes = _table(root / "proc/meminfo")["MemAvailable:"]
        free.append(kilobytes << 10)
    for folder in groups_of("memory", root):
        with contextlib.suppress(OSError, KeyError, ValueError):
            free.append(_free_of(folder))
    if free:
        return max(0, min(free))
    return None


def usable_memory(root: Path = Path("/")) -> int:
    """Return the bytes that the host has, or a control group may have, whichever is less, used or not.

    Raises:
        OSError: this isn't Linux.
    """
    limits = [_table(root / "proc/meminfo")["MemTotal:"] << 10]
    for folder in groups_of("memory", root):
        with contextlib.suppress(OSError, ValueError):
            limits.append(int((folder / _names_of(folder).limit).read_text()))
    return min(limits)


def problem_of_memory(ranks: int, rank_bytes: int, root: Path = Path("/")) -> str:
    """Return why this host can't hold so many ranks; "" if it can."""
    memory = usable_memory(root)
    if ranks * rank_bytes > memory:
        return f"{ranks} ranks need more memory than the {memory >> 30} GiB of this machine or container"
    return ""


def _names_of(folder: Path) -> _Names:
    if (folder / _VERSION_2.limit).exists():
        return _VERSION_2
    return _VERSION_1


def _free_of(folder: Path) -> int:
    names = _names_of(folder)
    # In version 2, the text "max" stands for no limit, and raises a ValueError.
    limit = int((folder / names.limit).read_text())
    usage = int((folder / names.usage).read_text())
    # Pages of files count as free: the kernel drops pages that haven't been read lately before it refuses memory.
    cache = _table(folder / "memory.stat").get(names.cache, 0)
    return limit - usage + cache


def _table(path: Path) -> dict[str, int]:
    rows = {}
    for line in path.read_text().splitlines():
        words = line.split()
        rows[words[0]] = int(words[1])
    return rows
