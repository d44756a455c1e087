"""The ranks of ``npurun speed`` on this host: forks of a process of their own, ``python -m`` this module with a
descriptor, SETTINGS script argument ….

A process reads how it copies memory when it starts, and npurun sets that for ranks, but nobody for one process.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from npu_device._src.membership.tunables import tunables_of_ranks
from npu_device._src.speed.timed_process import Setup, TimedProcess
from npu_device._src.speed.timed_runs import TimedRuns
from npu_device._src.verify.forking import run_script
from npu_device._src.verify.plan import PROBLEM, PlannedProcess

_MODULE = "npu_device._src.speed.rank_runs"
_MESSAGE_BYTES = 1 << 10  # the longest message of the two processes


class RankRuns:
    """That process, as the one that decides about the runs sees it.

    Attributes:
        start: what it is before the first run, with a folder of its own.
    """

    def __init__(self, start: TimedProcess, words: Sequence[str]) -> None:
        self.start = replace(start, directory=str(Path(start.directory, "ranks")))
        self._directory = start.directory
        # Otherwise the files that the script writes before it is forked would go with those of the first run.
        temporary = Path(os.environ["TMPDIR"], "ranks")
        temporary.mkdir()
        Path(self.start.directory).mkdir()
        # Messages of this type arrive whole.
        self._channel, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        with theirs:
            settings = (str(theirs.fileno()), json.dumps(vars(self.start)))
            subprocess.Popen(
                [sys.executable, "-u", "-m", _MODULE, *settings, *words],
                env={**os.environ, **tunables_of_ranks(), "TMPDIR": str(temporary)},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )

    def run(self, setup: Setup, round_name: str, deadline: float) -> tuple[int, int] | None:
        """Run the ranks of a setup; return rank and exit code if one has ended before it was timed."""
        self._channel.settimeout(max(deadline - time.monotonic(), 1.0))
        try:
            self._channel.send(json.dumps([setup.ranks, setup.binding, round_name]).encode())
            reply = self._channel.recv(_MESSAGE_BYTES)
        except TimeoutError:
            return None
        except OSError:
            reply = b""
        if not reply:
            self._fail()
        early_end: tuple[int, int] | None = json.loads(reply)
        return early_end

    def _fail(self) -> None:
        """Tell why that process has ended, and end: the script has failed before its first step, or it was killed."""
        problem = Path(self.start.directory, PROBLEM)
        if not problem.exists():
            problem.write_text(
                "the process that becomes the ranks was killed, as the system does when memory is short.\nWhat to do: "
                "try fewer ranks (-n)"
            )
        shutil.copy(problem, self._directory)
        os._exit(1)


class _RanksProcess(TimedRuns):
    """That process itself."""

    def __init__(self, channel: socket.socket, start: TimedProcess, script: str) -> None:
        self._channel = channel
        super().__init__(start, script)

    def runs(self) -> Iterator[Sequence[PlannedProcess]]:
        while message := self._channel.recv(_MESSAGE_BYTES):
            ranks, binding, round_name = json.loads(message)
            kept_paths = self.temporary_paths()
            self._processes = self.current.run_of(Setup(ranks, binding), round_name)
            self._early_end = None
            yield self._processes
            self.remove_files(kept_paths)
            self._channel.send(json.dumps(self._early_end).encode())


def main(arguments: Sequence[str]) -> None:
    """Run a script as the ranks of all runs on this host."""
    descriptor, settings, *words = arguments
    channel = socket.socket(fileno=int(descriptor))
    start = TimedProcess(**json.loads(settings))
    run_script(_RanksProcess(channel, start, words[0]), words)


if __name__ == "__main__":
    main(sys.argv[1:])
