"""Whole jobs of short scripts: one process per rank, from start to exit. For what can't be tried in a pool: failing,
leaving, being killed.
"""

from __future__ import annotations

import subprocess
import time
from pathlib import Path
from typing import NamedTuple

from ranks import clean_environment, table_environment

from npu_device._src.testing.forked import Process


class Ended(NamedTuple):
    """The end of one rank."""

    code: int
    output: str
    at: float  # seconds on the clock of time.monotonic()


def start(directory: Path, size: int, script: str, **environment: str) -> list[Process]:
    """Start ``size`` ranks of a script (Python text), with a rank table when there are several."""
    return start_each(directory, script, _tables(directory, size, environment))


def start_command(directory: Path, size: int, command: list[str], **environment: str) -> list[Process]:
    """Start ``size`` ranks of a script's file, with arguments."""
    return _start(command, _tables(directory, size, environment))


def start_each(directory: Path, script: str, environments: list[dict[str, str]]) -> list[Process]:
    """Start one process of a script for each set of variables."""
    path = directory / "script.py"
    path.write_text(script)
    return _start([str(path)], environments)


def _tables(directory: Path, size: int, environment: dict[str, str]) -> list[dict[str, str]]:
    tables = [table_environment(directory, size, rank) if size > 1 else {} for rank in range(size)]
    return [{**table, **environment} for table in tables]


def _start(command: list[str], environments: list[dict[str, str]]) -> list[Process]:
    return [
        Process(command, {**clean_environment(), "TF_CPP_MIN_LOG_LEVEL": "2", **environment})
        for environment in environments
    ]


def finish(processes: list[Process], timeout: float = 60) -> list[Ended]:
    """Wait for every rank; those that are not done in time are killed and fail the test."""
    ended: dict[int, float] = {}
    deadline = time.monotonic() + timeout
    while len(ended) < len(processes) and time.monotonic() < deadline:
        for rank, process in enumerate(processes):
            if rank not in ended and process.poll() is not None:
                ended[rank] = time.monotonic()
        time.sleep(0.02)
    late = [rank for rank in range(len(processes)) if rank not in ended]
    for rank in late:
        processes[rank].kill()
    results = []
    for rank, process in enumerate(processes):
        results.append(Ended(process.wait(), process.output, ended.get(rank, float("inf"))))
    if late:
        outputs = "\n".join(f"--- rank {rank} ---\n{result.output[-3000:]}" for rank, result in enumerate(results))
        raise AssertionError(f"rank(s) {late} did not end within {timeout} s\n{outputs}")
    return results


def run(directory: Path, size: int, script: str, timeout: float = 60, **environment: str) -> list[Ended]:
    """Start and wait."""
    return finish(start(directory, size, script, **environment), timeout)


def run_anew(commands: list[list[str]], environments: list[dict[str, str]], timeout: float = 60) -> list[Ended]:
    """Start commands side by side, with nothing imported beforehand, and wait."""
    processes = [
        subprocess.Popen(
            command,
            env={**clean_environment(), "TF_CPP_MIN_LOG_LEVEL": "2", **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for command, environment in zip(commands, environments)
    ]
    try:
        outputs = [process.communicate(timeout=timeout)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [Ended(process.returncode, output, time.monotonic()) for process, output in zip(processes, outputs)]
