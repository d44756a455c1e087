"""MPI as all ranks of the job share it, once it has been started (``mpi_messages``)."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class MpiWorld:
    """MPI as all ranks share it."""

    mpi: Any  # mpi4py's module
    comm: Any  # communicator of all ranks, in the order of the ranks of the job; groups meet in it
    tags: int  # the number that MPI has
    library: str
    ended: threading.Event = field(default_factory=threading.Event)  # set when this rank leaves
    # Programs that failed: MPI may still write to their memory.
    abandoned: list = field(default_factory=list)
