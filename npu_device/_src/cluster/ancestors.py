"""The processes that have started this one, as the kernel knows them."""

from __future__ import annotations

import os
from pathlib import Path

_PARENT, _START_TIME = 1, 19  # in /proc/PID/stat, behind the program's name
_MOST = 50


def start_time(pid: int) -> str:
    """Return when a process started, in ticks of the kernel, as numbers of processes are used again; "" if unknown."""
    return _fields(pid)[1]


def ancestors() -> list[tuple[int, str]]:
    """Return number and start time of the parent of this process, of its parent, and so on, as far as they are
    known."""
    found: list[tuple[int, str]] = []
    pid = os.getppid()
    while pid > 0 and len(found) < _MOST:
        parent, started = _fields(pid)
        if not started:
            break
        found.append((pid, started))
        pid = parent
    return found


def _fields(pid: int) -> tuple[int, str]:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        return int(fields[_PARENT]), fields[_START_TIME]
    except (OSError, IndexError, ValueError):
        return 0, ""
