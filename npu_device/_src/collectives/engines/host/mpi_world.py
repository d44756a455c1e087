"""The job's MPI on this rank, once ``opening`` has started it."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class MpiWorld:
    """MPI as all ranks share it.

    Attributes:
        mpi: mpi4py's module.
        comm: a communicator of all ranks, in the order of the job's ranks, in which groups meet.
        tags: number of tags that MPI has.
        library: name and version of the MPI library.
        ended: set when this rank leaves.
    """

    mpi: Any
    comm: Any
    tags: int
    library: str
    ended: threading.Event = field(default_factory=threading.Event)
