"""The settings of one process of ``npurun verify``, and the files that it leaves. Imports no TensorFlow."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

STEPS, FACTS, DONE, FAILED = "steps.jsonl", "facts.json", "done", "failed.txt"


@dataclass(frozen=True)
class Settings:
    """One run of the script.

    Attributes:
        directory: of all runs.
        name: of this run.
        ranks: number of ranks; 1 for a process without a job.
        steps: of every optimizer.
        perturbed: inputs are changed in their last bit.
        module: the script is the name of a module.
    """

    directory: str
    name: str
    ranks: int
    steps: int
    perturbed: bool = False
    module: bool = False

    def folder(self, rank: int) -> Path:
        """Return the folder of a rank's record."""
        return Path(self.directory, self.name, f"rank{rank}")

    def written(self) -> str:
        """Return the settings as text for a command line."""
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, text: str) -> Settings:
        """Return the settings that ``written`` has written."""
        return cls(**json.loads(text))
