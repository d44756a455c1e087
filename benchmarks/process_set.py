"""A rival's processes: one per rank, started once, commanded through a pipe, asleep in between.

``worker`` carries out the commands.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from benchmarks import mpiexecs
from benchmarks.sides import SIDES
from npu_device._src.testing import hosts

_ROOT = Path(__file__).parents[1]
_ANSWER_SECONDS = 600.0
_AFTER_ERROR_SECONDS = 30.0
_ENDING_SECONDS = 5.0
_TERMINATION_SECONDS = 2.0
_TAIL_LINES = 15
_CLUSTER_PREFIXES = (
    *("RANK", "LOCAL_", "WORLD_SIZE", "CM_", "HCCL_", "NPU_", "ASCEND_", "DEVICE_ID", "JOB_ID"),
    *("TF_CONFIG", "TF_NUM_", "MASTER_", "GLOO_", "OMP_", "OMPI_", "MPI", "PMI", "HYDRA_", "UCX_"),
)


class RivalError(RuntimeError):
    """A rival could not carry out a command; the text names the rank and the reason."""


class ProcessSet:
    """The processes of one side. They start while the constructor returns; the first ``ask`` waits for them."""

    def __init__(self, side: str, ranks: int, logs: Path) -> None:
        """Start the processes.

        Args:
            side: one of ``sides.SIDES`` whose packages are installed.
            ranks: number of ranks.
            logs: directory for their output and their rank table.
        """
        self._logs: list[Path] = []
        self.processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[Connection] = []
        self._ended_because: str | None = None
        logs.mkdir(parents=True, exist_ok=True)
        kind = SIDES[side]
        theirs: list[Connection] = []
        commands: list[list[str]] = []
        for rank in range(1 if kind.is_alone else ranks):
            mine, other = Pipe()
            self._connections.append(mine)
            theirs.append(other)
            commands.append(
                [
                    sys.executable,
                    "-m",
                    "benchmarks.worker",
                    str(other.fileno()),
                    side,
                    str(rank),
                    str(ranks),
                ]
            )
        environments = kind.environments(ranks, logs)
        if not kind.uses_gpus:
            environments = [
                {**environment, "CUDA_VISIBLE_DEVICES": "-1"} for environment in environments
            ]
        if kind.on_hosts:
            cores = sorted(os.sched_getaffinity(0))
            pinned = [str(cores[rank % len(cores)]) for rank in range(ranks)]
            commands = [
                ["taskset", "-c", core, *command] for core, command in zip(pinned, commands)
            ]
        if kind.started_by_mpiexec:
            command, variables = _under_mpiexec(commands, kind.on_hosts)
            self._start(
                command,
                {**environments[0], **variables},
                logs / f"{side}.log",
                theirs,
            )
        else:
            if kind.on_hosts:
                commands = [hosts.on_host(rank, command) for rank, command in enumerate(commands)]
            for rank, (command, environment) in enumerate(zip(commands, environments)):
                self._start(command, environment, logs / f"{side}_rank{rank}.log", [theirs[rank]])
        for other in theirs:
            other.close()

    def _start(
        self, command: list[str], environment: dict[str, str], log: Path, pipes: list[Connection]
    ) -> None:
        self._logs.append(log)
        with log.open("wb") as output:
            self.processes.append(
                subprocess.Popen(
                    command,
                    cwd=_ROOT,
                    env={**clean_environment(), **environment},
                    pass_fds=[pipe.fileno() for pipe in pipes],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
            )

    def ask(self, *message: Any) -> list[Any]:
        """Tell every rank the same thing, and return their answers by rank.

        Raises:
            RivalError: a rank answered with an error, ended, or did not answer. Unless all have answered, the processes
                are terminated, and every later call raises as well.
        """
        if self._ended_because is not None:
            raise RivalError(f"its processes were ended before, because {self._ended_because}")
        answers: dict[int, Any] = {}
        problems: list[str] = []
        unheard = {connection: rank for rank, connection in enumerate(self._connections)}
        lost = False
        for connection, rank in list(unheard.items()):
            try:
                connection.send(message)
            except OSError:
                del unheard[connection]
                problems.append(f"rank {rank} has ended")
        deadline = time.monotonic() + (_AFTER_ERROR_SECONDS if problems else _ANSWER_SECONDS)
        while unheard:
            ready = wait(list(unheard), max(0.0, deadline - time.monotonic()))
            if not ready:
                problems.append(
                    f"rank(s) {', '.join(map(str, unheard.values()))} gave no answer in time"
                )
                break
            for connection in [connection for connection in unheard if connection in ready]:
                rank = unheard.pop(connection)
                try:
                    succeeded, value = connection.recv()
                except (EOFError, OSError):
                    succeeded, value, lost = False, self._ending(rank), True
                if succeeded:
                    answers[rank] = value
                else:
                    problems.append(f"rank {rank}: {value}")
                    deadline = min(deadline, time.monotonic() + _AFTER_ERROR_SECONDS)
        if problems:
            text = "; ".join(problems)
            if unheard or lost or len(answers) + len(problems) < len(self._connections):
                text += "\n" + self._tails()
                self._ended_because = problems[0]
                self.close(patience=0.0)
            raise RivalError(text)
        return [answers[rank] for rank in range(len(self._connections))]

    def close(self, patience: float = 15.0) -> None:
        """Let the processes end, and kill those that haven't after ``patience`` seconds."""
        for connection in self._connections:
            connection.close()
        deadline = time.monotonic() + patience
        for process in self.processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                self._kill(process)

    @staticmethod
    def _kill(process: subprocess.Popen[bytes]) -> None:
        """End a process, by SIGTERM first: mpiexec then ends its ranks too."""
        process.terminate()
        try:
            process.wait(_TERMINATION_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _ending(self, rank: int) -> str:
        """Return a text on how a process that has closed its pipe ended."""
        try:
            # mpiexec's own process stands for all of its ranks.
            code = self.processes[min(rank, len(self.processes) - 1)].wait(_ENDING_SECONDS)
        except subprocess.TimeoutExpired:
            return "its process is about to end"
        if code == -signal.SIGKILL:
            return "its process ended by SIGKILL; likely cause: memory ran out"
        return f"its process ended with exit code {code}"

    def _tails(self) -> str:
        parts = []
        for log in self._logs:
            lines = log.read_text(errors="replace").splitlines()[-_TAIL_LINES:]
            parts.append("\n".join([f"--- end of {log} ---", *lines]))
        return "\n".join(parts)


def _under_mpiexec(commands: list[list[str]], on_hosts: bool) -> tuple[list[str], dict[str, str]]:
    """Return one command that starts all of them, and its variables. Each rank has its own arguments."""
    found = mpiexecs.mpiexec("MPICH")
    assert found is not None
    line = [word for command in commands for word in (":", "-n", "1", *command)][1:]
    if not on_hosts:
        return [found, *line], mpiexecs.variables_of(found)
    names = ",".join(map(hosts.name, range(len(commands))))
    launcher = ["-launcher", "ssh", "-launcher-exec", str(_ROOT / "benchmarks" / "ssh_to_host")]
    launcher += ["-localhost", hosts.address(0), "-hosts", names]
    return hosts.on_host(0, [found, *launcher, *line]), mpiexecs.variables_of(found)


def clean_environment() -> dict[str, str]:
    """Return this process's environment without settings of a cluster or its threads; the same Keras for all."""
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith(_CLUSTER_PREFIXES)
    }
    # In steps without communication the ranks drift apart, which an audit would find.
    return {
        **inherited,
        "TF_USE_LEGACY_KERAS": "1",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "NPU_DEVICE_AUDIT": "off",
    }
