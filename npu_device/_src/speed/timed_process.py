"""The plan of ``npurun speed``: which processes run a script, and the files that they leave. Imports no TensorFlow."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from pathlib import Path

from npu_device._src.machine.core_sets import NONE
from npu_device._src.verify.plan import PlannedProcess

WARM_UP_STEPS = 5
"""Steps that aren't timed: they trace functions, fill caches, and are checked."""

LEAST_SECONDS = 0.5
"""Short steps are timed for this long, whatever their number, since times are read every few milliseconds."""

TRACED = "traced"
LEFT_OUT = "left_out.json"
"""The labels of setups that aren't measured, with the reasons."""

_TIMES = "times.json"
_MEMORY = "memory.json"


@dataclass(frozen=True)
class Setup:
    """A number of ranks, and how they are bound to cores: one of ``core_sets.BINDINGS``."""

    ranks: int
    binding: str = NONE

    @property
    def label(self) -> str:
        if self.binding == NONE:
            return str(self.ranks)
        return f"{self.ranks} bound"


@dataclass(frozen=True)
class TimedProcess(PlannedProcess):
    """One process, whose steps are timed; in the first round, it also tells where their time goes.

    ``steps`` is how many are timed at least.
    """

    round: str = TRACED
    binding: str = NONE

    @property
    def setup(self) -> Setup:
        return Setup(self.ranks, self.binding)

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

    def run_of(self, setup: Setup, round_name: str) -> list[TimedProcess]:
        """Return the processes of a run in a round."""
        name = f"{setup.ranks}-{setup.binding}.{round_name}"
        run = replace(self, run=name, ranks=setup.ranks, round=round_name, binding=setup.binding)
        return [replace(run, rank=rank) for rank in range(setup.ranks)]


@dataclass(frozen=True)
class Times:
    """What a process has measured: ``steps`` took ``seconds``, and had ``rows`` of samples, if they were counted."""

    steps: int
    seconds: float
    rows: int | None = None


def save_times(process: PlannedProcess, times: Times) -> None:
    """Leave times, all of them at once."""
    # npurun may read at any time.
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
