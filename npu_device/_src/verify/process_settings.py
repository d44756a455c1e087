"""The settings of the processes of ``npurun verify``, and the files that they leave. Imports no TensorFlow."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

STEPS, FACTS, DONE, FAILED, CODE, LOG = "steps.jsonl", "facts.json", "done", "failed.txt", "code", "output.log"
START = "start"
"""The run whose process begins the script, and becomes all others."""


@dataclass(frozen=True)
class Settings:
    """One process.

    Attributes:
        directory: of all runs.
        run: name of its run.
        steps: of every optimizer.
        ranks: number of ranks of its run; 1 for a process without a job.
        rank: its own.
        perturbed: inputs are changed in their last bit.
        module: the script is the name of a module.
        replicate: ranks replicate the script's models.
        environment: what describes the job to it.
    """

    directory: str
    run: str
    steps: int
    ranks: int = 1
    rank: int = 0
    perturbed: bool = False
    module: bool = False
    replicate: bool = False
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        """Return the folder of its record."""
        return Path(self.directory, self.run, f"rank{self.rank}")

    def beside(self, rank: int) -> Path:
        """Return the folder of another rank of its run."""
        return replace(self, rank=rank).folder


def written(runs: Sequence[Sequence[Settings]]) -> str:
    """Return the processes as text for a command line: lists of those that run at the same time."""
    return json.dumps([[asdict(process) for process in run] for run in runs])


def read(text: str) -> list[list[Settings]]:
    """Return the processes that ``written`` has written."""
    return [[Settings(**process) for process in run] for run in json.loads(text)]
