"""The plan of ``npurun verify``: which processes run a script, as one, as its twin with perturbed inputs, and as ranks.

Imports no TensorFlow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from npu_device._src.membership.rank_environment import table_environment

# The files that processes leave.
LOG = "output.log"
PROBLEM = "problem.txt"  # of the process of START: why nothing can be compared
DONE = "done"  # of a process that has recorded enough; written by the waiting process if a process has ended
FAILED = "failed.txt"  # written by the process that waits: how a process failed

START = "start"
"""The run whose process begins the script, and becomes all others."""

_SINGLE = "one"  # run of the single process
_PERTURBED = "perturbed"  # run of its twin, whose inputs are changed in their last bit

SEED = 20201  # of all processes


@dataclass(frozen=True)
class PlannedProcess:
    """What one process is to be."""

    directory: str  # folder of all runs
    steps: int  # steps of every optimizer to record
    is_module: bool = False  # the script is the name of a module
    replicates: bool = False  # ranks replicate the models of the script
    # Seconds after its first step in which the single process begins further phases.
    seconds: float = 30.0
    # Numbers of ranks, which ascend. The first is the number that was asked for; all others are tried beside it.
    sizes: Sequence[int] = ()
    run: str = (
        START  # name of its run: of all its ranks, but one process and its twin have one each
    )
    ranks: int = 1  # number of ranks of its run; 1 for a process without a job
    rank: int = 0

    @property
    def folder(self) -> Path:
        """Return the folder of the files that it leaves."""
        return Path(self.directory, self.run, f"rank{self.rank}")

    @property
    def files(self) -> Path:
        """Return the folder of the files that its run writes, one for all of its ranks."""
        return Path(self.directory, self.run, "files")

    @property
    def name(self) -> str:
        """Return what messages call its run."""
        if self.ranks > 1:
            return f"{self.ranks} ranks"
        if self.is_perturbed:
            return "one process with perturbed inputs"
        return "one process"

    @property
    def single(self) -> PlannedProcess:
        """Return the single process with which ranks are compared."""
        return replace(self, run=_SINGLE, ranks=1, rank=0)

    @property
    def is_single(self) -> bool:
        """Return True for the single process, False for its perturbed twin and for ranks."""
        return self.run == _SINGLE

    @property
    def is_perturbed(self) -> bool:
        return self.run == _PERTURBED

    def environment(self) -> dict[str, str]:
        """Return the variables that describe its job to it; the rank table is written once."""
        if self.ranks == 1:
            return {}
        # The folder of the run, in which the rank table lies.
        self.folder.parent.mkdir(exist_ok=True)
        return {
            **table_environment(self.folder.parent, self.ranks, self.rank),
            "HCCL_CONNECT_TIMEOUT": "600",
        }

    def runs(self) -> list[list[PlannedProcess]]:
        """Return the processes that run at a time: one and its perturbed twin, then each number of ranks."""
        ranks = [
            [replace(self, run=f"ranks{size}", ranks=size, rank=rank) for rank in range(size)]
            for size in self.sizes
        ]
        return [[self.single, replace(self, run=_PERTURBED)], *ranks]
