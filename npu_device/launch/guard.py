"""Kills the ranks when the launcher itself is killed and can't do it any more.

A second process that holds one end of a pipe: the pipe breaks in the moment the launcher dies, whatever killed it. It
runs this file as a script in a bare interpreter, so the file imports the standard library only. Unlike the parent-death
signal of Linux this reaches the ranks' children too, and needs no code between fork and exec.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from typing import Any

_DONE = "done"


class Guard:
    """The guard as the launcher sees it: a context manager around the whole launch.

    Args:
        directory: the launcher's temporary directory, which the guard removes when the launcher can't.
    """

    def __init__(self, directory: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, directory],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # whoever kills the launcher's group must not kill the guard with it
        )

    def watch(self, group: int) -> None:
        """Have a process group killed when the launcher dies."""
        self._tell(str(group))

    def __enter__(self) -> Guard:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        self._tell(_DONE)
        self._process.communicate()

    def _tell(self, word: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # somebody killed the guard; the launch itself doesn't depend on it
            self._process.stdin.write(word.encode() + b"\n")
            self._process.stdin.flush()


def _main() -> None:
    groups = []
    for line in sys.stdin:
        if line.strip() == _DONE:
            return
        groups.append(int(line))
    for group in groups:
        with contextlib.suppress(OSError):
            os.killpg(group, signal.SIGKILL)
    shutil.rmtree(sys.argv[1], ignore_errors=True)


if __name__ == "__main__":
    _main()
