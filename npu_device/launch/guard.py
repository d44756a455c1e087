"""Kill the ranks if the launcher itself is killed and can't do it any more.

A pipe to this second process breaks when the launcher dies. It runs this file in a bare interpreter. Unlike the
parent-death signal of Linux, this reaches the ranks' children too, and needs no code between fork and exec.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys

_DONE = "done"


class RankGuard:
    """The guard, around the whole launch; it also removes ``directory`` if the launcher can't, and always a folder in
    memory, which only ranks that are killed leave.
    """

    def __init__(
        self, directory: str | os.PathLike[str] | None, folder: os.PathLike[str] | None = None
    ) -> None:
        self._folder = folder
        folders = [path for path in (directory, folder) if path is not None]
        # Started with -I and -S: nothing of the user's site-packages or variables can delay or break the guard.
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, *folders],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            # A kill of the launcher's group must not include the guard.
            start_new_session=True,
        )

    def __enter__(self) -> RankGuard:
        return self

    def __exit__(self, *_: object) -> None:
        self.tell(_DONE)
        self._process.communicate()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def tell(self, word: object) -> None:
        """Register a process group, or minus the number of one that has ended: its number may be reused."""
        assert self._process.stdin is not None
        # The guard may have been killed, on which the launch itself doesn't depend.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(f"{word}\n".encode())
            self._process.stdin.flush()


def _main() -> None:
    # A scheduler may signal all processes of a job (Slurm); the guard ends after the launcher.
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(signum, signal.SIG_IGN)
    groups = set()
    # The loop ends without "done" only if the launcher has died.
    for line in sys.stdin:
        if line.strip() == _DONE:
            return
        group = int(line)
        if group > 0:
            groups.add(group)
        else:
            groups.discard(-group)
    for group in groups:
        with contextlib.suppress(OSError):
            os.killpg(group, signal.SIGKILL)
    for directory in sys.argv[1:]:
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    _main()
