"""The steps of MPICH, through mpi4py on numpy's memory."""

from __future__ import annotations

from typing import Callable

import numpy as np
from mpi4py import MPI

from benchmarks.payload import payload, require_sum


class MpichSide:
    """One rank started by ``mpiexec``. It waits for the next command outside MPI, which would occupy the core."""

    def __init__(self, rank: int, ranks: int) -> None:
        found = (MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size)
        if found != (rank, ranks):
            raise RuntimeError(
                f"this should be rank {rank} of {ranks}; MPI says rank {found[0]} of {found[1]}"
            )
        self._rank = rank
        self._ranks = ranks

    def all_reduce(self, size: int) -> Callable[[], None]:
        """Return a step that sums ``size`` bytes over the ranks, from one array into another."""
        mine = payload(size, self._rank)
        result = np.empty_like(mine)

        def step() -> None:
            MPI.COMM_WORLD.Allreduce(mine, result)

        step()
        require_sum(result, self._ranks)
        return step
