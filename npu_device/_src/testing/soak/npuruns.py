"""The npuruns of a soak, one for each node. All but that of node 0 can leave their job, and join it again."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from npu_device._src.cluster.time_limits import RECOVERY_SECONDS

CHANGES = ("leave", "join")


class Launchers(ExitStack):
    """Starts npurun on each node; a context manager that waits for all of them.

    Args:
        commands: the command line for each node.
        environment: of all nodes.
        directory: for their output.
    """

    def __init__(
        self,
        commands: Sequence[Sequence[str]],
        environment: dict[str, str],
        directory: Path,
    ) -> None:
        super().__init__()
        self._commands = commands
        self._environment = environment
        self._directory = directory
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        # Nodes that have left, or joined again: the job doesn't depend on them.
        self._free = set[int]()
        for node in range(len(commands)):
            self._start(node)

    @property
    def pids(self) -> dict[int, int]:
        """Return the processes that run now, by node."""
        return {
            node: process.pid for node, process in self._processes.items() if process.poll() is None
        }

    def change(self, change: str, share: float) -> int:
        """Let a node leave or join, that at a share of those that can; return it. ProcessLookupError if none can."""
        running = self.pids
        leaves = change == "leave"
        # Node 0 leads the job.
        nodes = [node for node in self._processes if node > 0 and (node in running) == leaves]
        if not nodes:
            raise ProcessLookupError
        node = nodes[int(share * len(nodes))]
        self._free.add(node)
        if leaves:
            self._processes[node].send_signal(signal.SIGTERM)
        else:
            self._start(node)
        return node

    def wait(self) -> int:
        """Return the exit code of the job when all have ended, of the first node that failed."""
        # The job is over when the npurun of node 0 has ended.
        codes = [self._processes[0].wait()]
        for node, process in self._processes.items():
            if node not in self._free:
                codes.append(process.wait())
        # A node that has just come finds no job any more.
        for node in self._free:
            if node in self.pids:
                self._processes[node].send_signal(signal.SIGINT)
            self._processes[node].wait(RECOVERY_SECONDS)
        return next(filter(None, codes), 0)

    def terminate(self) -> None:
        for process in self._processes.values():
            process.terminate()

    def _start(self, node: int) -> None:
        path = self._directory / f"output{node or ''}"
        # A node that comes back writes below what it wrote before.
        output = self.enter_context(path.open("ab"))
        process = subprocess.Popen(
            self._commands[node],
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        self._processes[node] = self.enter_context(process)
