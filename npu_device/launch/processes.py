"""The process of one rank: started in its own session, watched by a thread, signalled together with its children."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Callable


@dataclass(frozen=True)
class Exit:
    """The end of a process: exit code, or minus the number of the signal that killed it; seconds since the epoch."""

    status: int
    time: float

    @property
    def code(self) -> int:
        return self.status if self.status >= 0 else 128 - self.status

    def __str__(self) -> str:
        if self.status >= 0:
            return f"exit code {self.status}"
        try:
            return f"killed by {signal.Signals(-self.status).name}"
        except ValueError:
            return f"killed by signal {-self.status}"


class Process:
    """A running rank.

    The ended process stays a zombie until ``reap``: its number, which is also its group's, can't be reused
    while signals may still be sent to it.

    Raises:
        OSError: the program can't be started.
    """

    def __init__(
        self, rank: int, command: Sequence[str], environment: Mapping[str, str], on_exit: Callable[[], None]
    ) -> None:
        self.rank = rank
        self.exit: Exit | None = None
        self._gone = False
        self._on_exit = on_exit
        self._popen = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,  # one terminal can't serve several readers
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C of the terminal goes to the launcher alone, which passes it on once
        )
        assert self._popen.stdout is not None and self._popen.stderr is not None
        self.stdout, self.stderr = self._popen.stdout, self._popen.stderr
        self.pid = self._popen.pid
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()

    def send(self, number: int, spares_children: bool = False) -> None:
        """Send a signal to the process and, unless ``spares_children``, to its children in the same process group."""
        if self._gone:  # another process may have the number by now
            return
        # PermissionError: the rest of the group runs as another user (sudo in the script).
        with contextlib.suppress(ProcessLookupError, PermissionError):
            (os.kill if spares_children else os.killpg)(self.pid, number)

    def reap(self) -> bool:
        """Release the ended process. Return True while children of it are left in its group."""
        self._watcher.join()  # which looks at the zombie
        self._popen.wait()
        try:
            os.killpg(self.pid, 0)
        except (ProcessLookupError, PermissionError):
            self._gone = True
        return not self._gone

    def _watch(self) -> None:
        result = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        assert result is not None
        self.exit = Exit(result.si_status if result.si_code == os.CLD_EXITED else -result.si_status, time.time())
        self._on_exit()
