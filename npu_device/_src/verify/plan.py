"""The plan of ``npurun verify``: which processes run a script. Imports no TensorFlow.

A run is one training by the script, in one process or on a number of ranks. In the perturbed run, one process trains
again, with inputs that differ in their last bit. Runs of a stage go on at the same time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from npu_device._src.membership.rank_environment import table_environment

# The files that processes leave.
LOG = "output.log"
PROBLEM = "problem.txt"  # of the process of START: why nothing can be compared
DONE = "done"  # of a process that has recorded enough; written by the process of START for one that has ended
FAILED = "failed.txt"  # written by the process of START: how a process failed

# Names of runs; those of ranks have their number.
START = "start"  # its process begins the script, becomes all others, and waits for them
_SINGLE = "one"
_PERTURBED = "perturbed"

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
    run: str = START  # name of its run
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
        """Return True for the single process, False for the perturbed one and for ranks."""
        return self.run == _SINGLE

    @property
    def is_perturbed(self) -> bool:
        return self.run == _PERTURBED

    def environment(self) -> dict[str, str]:
        """Return the variables that describe its job to it; the rank table is written once."""
        if self.ranks == 1:
            return {}
        # The rank table lies in the folder of the run.
        self.folder.parent.mkdir(exist_ok=True)
        return {
            **table_environment(self.folder.parent, self.ranks, self.rank),
            "HCCL_CONNECT_TIMEOUT": "600",
        }

    def stages(self) -> list[list[PlannedProcess]]:
        """Return the processes of each stage: the single and the perturbed one, then each number of ranks."""
        ranks = [
            [replace(self, run=f"ranks{size}", ranks=size, rank=rank) for rank in range(size)]
            for size in self.sizes
        ]
        return [[self.single, replace(self, run=_PERTURBED)], *ranks]
