"""Helps the tests of npurun: runs the real launcher on small scripts, and asks the system which processes are left."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from textwrap import dedent
from typing import Callable

from ranks import ROOT as ROOT, clean_environment

NPURUN = (sys.executable, "-m", "npu_device.launch")
LIMIT = 30.0


def script(directory: Path, text: str, name: str = "script.py") -> str:
    """Write a script and return its path."""
    path = directory / name
    path.write_text(dedent(text), encoding="utf-8")
    return str(path)


def environment(**extra: str) -> dict[str, str]:
    """The environment for a launcher: this process's own, without what describes a job."""
    return {**clean_environment(), **extra}


def npurun(
    *arguments: str, cwd: Path | None = None, limit: float = LIMIT, **extra: str
) -> subprocess.CompletedProcess[bytes]:
    """Run npurun to its end, with ``extra`` in its environment."""
    return subprocess.run(
        [*NPURUN, *arguments],
        cwd=cwd,
        env=environment(**extra),
        capture_output=True,
        timeout=limit,
        check=False,
    )


def shared_files() -> set[str]:
    """Return what is in /dev/shm, but for files of MPI jobs and OpenMP: other tests run those at the same time."""
    foreign = ("mpich_", "vader_", "sm_", "__KMP")
    return {path.name for path in Path("/dev/shm").glob("*") if not path.name.startswith(foreign)}


def assert_no_shared_files_since(before: set[str]) -> None:
    """Fail if there are new files in /dev/shm, and stay: those of tests that run at the same time go."""
    wait_until(lambda: shared_files() <= before)


def without_hint(stderr: bytes) -> bytes:
    """Return what npurun wrote beside its hint to ranks that don't open npu_device."""
    hints = (b"npurun: none of the ", b"npurun: To let them work together")
    return b"".join(line for line in stderr.splitlines(keepends=True) if not line.startswith(hints))


def start(
    *arguments: str, on: Callable[[list[str]], list[str]] = list, **extra: str
) -> subprocess.Popen[bytes]:
    """Start npurun as the leader of a process group of its own, as a shell starts a job.

    ``on`` makes the command line that runs a command somewhere else.
    """
    return subprocess.Popen(
        on([*NPURUN, *arguments]),
        env=environment(**extra),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def wait_until(condition: Callable[[], bool], limit: float = LIMIT) -> None:
    """Wait for a condition, and fail when it doesn't come true in time."""
    end = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)


def wait_for_files(directory: Path, pattern: str, count: int) -> list[int]:
    """Wait for ``count`` files with a number in them, and return the numbers."""

    def numbers() -> list[str]:
        return [path.read_text() for path in directory.glob(pattern)]

    wait_until(lambda: len(numbers()) == count and all(numbers()))
    return [int(number) for number in numbers()]


def is_running(pid: int) -> bool:
    """True unless the process is gone, or dead and only not collected yet."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"
