"""The plan of ``npurun speed``: which processes run a script, and the files that they leave. Imports no TensorFlow."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from pathlib import Path

from npu_device._src.verify.plan import PlannedProcess

WARM_UP_STEPS = 5
"""Steps that aren't timed: they trace functions, fill caches, and are checked."""

LEAST_SECONDS = 0.5
"""Short steps are timed for this long, whatever their number, since times are read every few milliseconds."""

TRACED = "traced"
LEFT_OUT = "left_out.json"
"""Numbers of ranks that aren't measured, with the reasons."""

_TIMES = "times.json"
_MEMORY = "memory.json"


@dataclass(frozen=True)
class TimedProcess(PlannedProcess):
    """One process, whose steps are timed; in the first round, it also tells where their time goes.

    ``steps`` is how many are timed at least.
    """

    round: str = TRACED

    @property
    def trace(self) -> Path:
        """Return the folder of the iteration trace of its run."""
        return Path(self.directory, self.run, "trace")

    def environment(self) -> dict[str, str]:
        """Return the variables that describe its job to it, and ask for a trace in the first round."""
        variables = super().environment()
        if variables and self.round == TRACED:
            options = json.dumps({"output": str(self.trace)})
            variables |= {"PROFILING_MODE": "true", "PROFILING_OPTIONS": options}
        return variables

    def run_of(self, ranks: int, round_name: str) -> list[TimedProcess]:
        """Return the processes of a run in a round."""
        name = f"{ranks}.{round_name}"
        return [
            replace(self, run=name, ranks=ranks, rank=rank, round=round_name)
            for rank in range(ranks)
        ]


@dataclass(frozen=True)
class Times:
    """What a process has measured: ``steps`` took ``seconds``, and had ``rows`` of samples, if they were counted."""

    steps: int
    seconds: float
    rows: int | None = None


def save_times(process: PlannedProcess, times: Times) -> None:
    """Leave times, all of them at once."""
    part = process.folder / "times.part"
    part.write_text(json.dumps(vars(times)))
    os.replace(part, process.folder / _TIMES)


def load_times(process: PlannedProcess) -> Times | None:
    """Return the times of a process; None if it has left none."""
    path = process.folder / _TIMES
    if not path.exists():
        return None
    return Times(**json.loads(path.read_text()))


def save_memory(process: PlannedProcess, size: int) -> None:
    (process.folder.parent / _MEMORY).write_text(json.dumps(size))


def load_memory(process: PlannedProcess) -> int:
    """Return the bytes of memory that all ranks of a run had."""
    return int(json.loads((process.folder.parent / _MEMORY).read_text()))
