"""A rival's processes: one a rank, started once, told what to do through a pipe, asleep in between.

What they do when they are told is ``worker``'s part.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from npu_device.launch import rank_table

_ROOT = Path(__file__).parents[1]
_HOST = "127.0.0.1"
_ANSWER_SECONDS = 600.0
_AFTER_ERROR_SECONDS = 30.0
_ENDING_SECONDS = 5.0
_TAIL_LINES = 15
_CLUSTER_PREFIXES = ("RANK_", "CM_", "HCCL_", "NPU_", "TF_CONFIG", "TF_NUM_", "ASCEND_", "DEVICE_ID", "JOB_ID")


class RivalError(RuntimeError):
    """A rival could not do what it was told; the text says which rank, and why."""


class ProcessSet:
    """The processes of one side. They come up while the constructor returns; the first ``ask`` waits for them."""

    def __init__(self, side: str, ranks: int, logs: Path) -> None:
        """Start the processes.

        Args:
            side: ``"npu"`` or ``"mirrored"``.
            ranks: how many.
            logs: directory for their output and their rank table.
        """
        self._side = side
        self._logs = [logs / f"{side}_rank{rank}.log" for rank in range(ranks)]
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[Connection] = []
        self._ended_because: str | None = None
        logs.mkdir(parents=True, exist_ok=True)
        environments = (_npu_environments if side == "npu" else _mirrored_environments)(ranks, logs)
        for rank, environment in enumerate(environments):
            mine, theirs = Pipe()
            command = [sys.executable, "-m", "benchmarks.worker", str(theirs.fileno()), side, str(rank), str(ranks)]
            with theirs, self._logs[rank].open("wb") as log:
                self._processes.append(
                    subprocess.Popen(
                        command,
                        cwd=_ROOT,
                        env={**_clean_environment(), **environment},
                        pass_fds=[theirs.fileno()],
                        stdout=log,
                        stderr=subprocess.STDOUT,
                    )
                )
            self._connections.append(mine)

    def ask(self, *message: Any) -> list[Any]:
        """Tell every rank the same thing, and return their answers by rank.

        Raises:
            RivalError: a rank answered with an error, ended, or did not answer. Unless all have answered, the
                processes are ended, and every later call raises as well.
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
                problems.append(f"rank(s) {', '.join(map(str, unheard.values()))} gave no answer in time")
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
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _ending(self, rank: int) -> str:
        """How a process that has closed its pipe ended."""
        try:
            code = self._processes[rank].wait(_ENDING_SECONDS)
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


def _npu_environments(ranks: int, directory: Path) -> list[dict[str, str]]:
    table = directory / "ranks.json"
    table.write_text(rank_table.text(1, ranks, _HOST, rank_table.free_port(_HOST)))
    common = {"RANK_TABLE_FILE": str(table.resolve()), "RANK_SIZE": str(ranks), "JOB_ID": "benchmarks"}
    return [{**common, "RANK_ID": str(rank), "ASCEND_DEVICE_ID": str(rank)} for rank in range(ranks)]


def _mirrored_environments(ranks: int, directory: Path) -> list[dict[str, str]]:
    workers = [f"{_HOST}:{rank_table.free_port(_HOST)}" for _ in range(ranks)]
    tasks = [{"type": "worker", "index": rank} for rank in range(ranks)]
    return [{"TF_CONFIG": json.dumps({"cluster": {"worker": workers}, "task": task})} for task in tasks]


def _clean_environment() -> dict[str, str]:
    """This process's environment without what describes a cluster or its threads; the same Keras for all rivals."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(_CLUSTER_PREFIXES)}
    return {**inherited, "TF_USE_LEGACY_KERAS": "1", "TF_CPP_MIN_LOG_LEVEL": "2"}
