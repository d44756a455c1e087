"""Whole jobs of short scripts, from start to exit: what a rank that fails, leaves or is killed does to the others.

It gives short names to the processes of ``npu_device.testing``. Users run whole scripts with npurun; these tests do
without it.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import NamedTuple

from ranks import clean_environment

from npu_device._src.pools.forked import ForkedProcess, start_ranks
from npu_device._src.whole_files import write_whole


class Ended(NamedTuple):
    """The end of one rank."""

    code: int
    output: str
    at: float  # seconds on the clock of time.monotonic()


def start(directory: Path, size: int, script: str, **environment: str) -> list[ForkedProcess]:
    """Start ``size`` ranks of a script (Python text), with a rank table when there are several."""
    return start_command(directory, size, _written(directory, script), **environment)


def start_command(
    directory: Path, size: int, command: list[str], **environment: str
) -> list[ForkedProcess]:
    """Start ``size`` ranks of a script's file, with arguments."""
    return start_ranks(directory, size, command, _variables(environment))


def start_each(
    directory: Path, script: str, environments: list[dict[str, str]]
) -> list[ForkedProcess]:
    """Start one process of a script for each set of variables."""
    command = _written(directory, script)
    return [ForkedProcess(command, _variables(environment)) for environment in environments]


def _written(directory: Path, script: str) -> list[str]:
    path = directory / "script.py"
    # A process that was started just before may be about to read it.
    write_whole(path, script.encode())
    return [str(path)]


def _variables(environment: dict[str, str]) -> dict[str, str]:
    settings = {"TF_CPP_MIN_LOG_LEVEL": "2", "PYTHONFAULTHANDLER": "1"}
    return {**clean_environment(), **settings, **environment}


def finish(processes: list[ForkedProcess], timeout: float = 120) -> list[Ended]:
    """Wait for every rank; those that are not done in time are killed and fail the test."""
    until = time.monotonic() + timeout
    while (late := _running(processes)) and time.monotonic() < until:
        time.sleep(0.02)
    if late:
        # Ranks and their children write the stacks of their threads where their output goes.
        _signal([processes[rank] for rank in late], signal.SIGABRT)
        time.sleep(1)
        _signal([processes[rank] for rank in late], signal.SIGKILL)
    results = [Ended(process.wait(), process.output, _end_of(process)) for process in processes]
    if late:
        outputs = "\n".join(
            f"--- rank {rank} ---\n{result.output[-9000:]}" for rank, result in enumerate(results)
        )
        raise AssertionError(f"rank(s) {late} did not end within {timeout} s\n{outputs}")
    return results


def _running(processes: list[ForkedProcess]) -> list[int]:
    return [rank for rank, process in enumerate(processes) if process.poll() is None]


def _signal(processes: list[ForkedProcess], signum: signal.Signals) -> None:
    """Send a signal to processes and their children; each process is the first of its group."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signum)


def _end_of(process: ForkedProcess) -> float:
    # The server of forks has written the file a moment after the end. The system rounds the time down to its ticks.
    age = time.time() - process._status.stat().st_mtime
    return time.monotonic() - age + 0.01


def kill(processes: list[ForkedProcess]) -> None:
    """Kill ranks, also those that are stopped."""
    for process in processes:
        process.kill()
        process.wait()


def run(
    directory: Path, size: int, script: str, timeout: float = 120, **environment: str
) -> list[Ended]:
    """Start and wait."""
    return finish(start(directory, size, script, **environment), timeout)


def outputs(
    directory: Path,
    size: int,
    script: str,
    code: int = 0,
    timeout: float = 120,
    keras: str = "3",
    **environment: str,
) -> list[str]:
    """Run a script to its end, which is to be the same on all ranks; return what each has printed."""
    environment = {"TF_USE_LEGACY_KERAS": "1" if keras == "2" else "0", **environment}
    results = run(directory, size, script, timeout, **environment)
    assert [result.code for result in results] == [code] * size, "\n".join(
        result.output for result in results
    )
    return [result.output for result in results]


def wait_for(processes: list[ForkedProcess], word: str = "ready", timeout: float = 120) -> None:
    """Wait until all ranks have printed a word."""
    until = time.monotonic() + timeout
    for process in processes:
        while word not in process.output:
            assert process.poll() is None and time.monotonic() < until, process.output
            time.sleep(0.02)


def stamp(output: str, word: str) -> float:
    """Return the time that a rank has printed behind "WORD at"."""
    found = re.search(rf"{word} at ([0-9.]+)", output)
    assert found, output
    return float(found.group(1))


def run_anew(
    commands: list[list[str]], environments: list[dict[str, str]], timeout: float = 120
) -> list[Ended]:
    """Start commands side by side, with nothing imported beforehand, and wait."""
    processes = [
        subprocess.Popen(
            command,
            env=_variables(environment),
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
    return [
        Ended(process.returncode, output, time.monotonic())
        for process, output in zip(processes, outputs)
    ]
