"""Ranks that MPICH's or Open MPI's ``mpiexec`` starts, where these are installed, and pools of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pool import Pool
from ranks import DEAD_PROXY, PYTHONPATH, clean_environment

from benchmarks import mpiexecs

MPIS = ("mpi", "Open MPI")  # as tests name engines
OPEN_MPI = {"OMPI_MCA_mpi_yield_when_idle": "1"}  # tells a pool that it is Open MPI's

AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}

_LIMIT = 100.0


def mpiexec(kind: str) -> list[str]:
    """Return the command of one kind; skip the test where there is none."""
    found = mpiexecs.mpiexec(kind)
    if found is None:
        pytest.skip(f"needs the mpiexec of {kind}")
    # More ranks than cores.
    return [found, *(["--map-by", "slot:OVERSUBSCRIBE"] if kind == "Open MPI" else [])]


def environment_for(command: list[str], **variables: str) -> dict[str, str]:
    """Return the environment of an ``mpiexec`` whose ranks use MPI."""
    path = os.pathsep.join([PYTHONPATH, *sys.path])
    of_library = mpiexecs.variables_of(next(word for word in command if word.endswith("mpiexec")))
    common = {
        **AS_ROOT,
        **of_library,
        "PYTHONPATH": path,
        "TF_CPP_MIN_LOG_LEVEL": "2",
    }
    return {**clean_environment(), **common, **variables}


def run_under(command: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
    """Run an ``mpiexec`` to its end; its ranks' errors are in its output."""
    return subprocess.run(
        command,
        env=environment_for(command, **variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=_LIMIT,
        check=False,
    )


class Started:
    """An ``mpiexec`` and its ranks, as one process of a pool."""

    def __init__(self, command: list[str], environment: dict[str, str], log: Path) -> None:
        self.name = " ".join(command)
        self._log = log
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        self.pid = self._process.pid
        self.poll = self._process.poll
        self.wait = self._process.wait

    @property
    def output(self) -> str:
        """Return what the ranks have printed so far."""
        return self._log.read_text(errors="replace")

    def kill(self) -> None:
        """End it, and its ranks with it."""
        self._process.terminate()


class MpiPool(Pool):
    """Ranks that one ``mpiexec`` has started, on MPI's engine: Open MPI's if its variables are given, or MPICH's."""

    def __init__(self, size: int, keras: str, **environment: str) -> None:
        pytest.importorskip("mpi4py")
        self._command = mpiexec("Open MPI" if OPEN_MPI.keys() <= environment.keys() else "MPICH")
        super().__init__(size, keras, **environment_for(self._command, **environment, **DEAD_PROXY))

    def _start(self, arguments: list[str], environment: dict[str, str]) -> list[Any]:
        command = [*self._command, "-n", str(self.size), sys.executable, *arguments]
        return [Started(command, environment, Path(self._directory.name) / "log")]
