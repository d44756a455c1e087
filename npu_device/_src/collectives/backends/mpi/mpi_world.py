"""The job's MPI on this rank, once ``opening`` has started it."""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass, field
from typing import Any

from npu_device._src.cluster.runtime import Runtime


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


WORLDS: weakref.WeakKeyDictionary[Runtime, MpiWorld] = weakref.WeakKeyDictionary()
"""Those that ``opening`` has started."""

REASONS: weakref.WeakKeyDictionary[Runtime, str] = weakref.WeakKeyDictionary()
"""Why it hasn't, although MPI's launcher started the ranks."""


def mpi_world_of(runtime: Runtime) -> MpiWorld | None:
    """Return the job's MPI, or None if it isn't used."""
    return WORLDS.get(runtime)


def reason_against(runtime: Runtime) -> str:
    """Return why MPI isn't used although its launcher started the ranks; "" if there is nothing to say."""
    return REASONS.get(runtime, "")
