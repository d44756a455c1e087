"""The plan of ``npurun speed``: which processes run a script, and the files that they leave. Imports no TensorFlow."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from npu_device._src.machine.core_sets import NONE
from npu_device._src.trace.records import FILE
from npu_device._src.verify.plan import DONE, PlannedProcess
from npu_device._src.whole_files import write_whole

TRACED = "traced"
_TIMES = "times.json"
_MARK = "npurun speed of a rank: "
_TRACED_ITERATIONS = "1-40"  # fewer bytes than npurun forwards in a line


class Setup(NamedTuple):
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

    ``steps`` is how many are timed at least, ``seconds`` the limit of all runs, ``rounds`` the least number of
    rounds; with fewer than five, nothing is decided. ``setups`` are all that are measured, as tuples; the first one is
    one process. ``hosts`` are for ``npurun --hosts``, which starts the ranks if there are any.
    """

    setups: Sequence[tuple[int, str]] = ()
    round: str = TRACED
    rounds: int = 5
    binding: str = NONE
    horovod: bool = False
    shard_optimizer: bool = False
    hosts: Sequence[str] = ()

    @property
    def name(self) -> str:
        return super().name + " bound" * (self.binding != NONE)

    @property
    def trace(self) -> Path:
        """Return the folder of the iteration trace of its run."""
        return self.folder.with_name("trace")

    @property
    def trace_file(self) -> Path:
        """Return its file in the trace, which exists if it has opened npu_device."""
        return self.trace / f"rank{self.rank}" / FILE

    @property
    def is_on_hosts(self) -> bool:
        """Return True if its run is a job of ``npurun --hosts``."""
        return self.ranks > 1 and bool(self.hosts)

    def environment(self) -> dict[str, str]:
        """Return the variables that describe its job to it, and ask for a trace in the first round."""
        if self.ranks == 1:
            return {}
        variables = {}
        # On hosts, npurun has set the variables of the job.
        if not self.hosts:
            variables = super().environment()
            if self.shard_optimizer:
                variables["NPU_DEVICE_SHARD_OPTIMIZER"] = "on"
        if self.round == TRACED:
            variables |= {
                "PROFILING_MODE": "true",
                "PROFILING_OPTIONS": json.dumps({"output": str(self.trace)}),
                "NPU_DEVICE_TRACE_ITERATIONS": _TRACED_ITERATIONS,
            }
        return variables

    def launch_words(self, setup: Setup) -> list[str]:
        """Return the options with which npurun starts the ranks of a setup."""
        words = ["-n", str(setup.ranks // max(1, len(self.hosts)))]
        if self.hosts:
            words += ["--hosts", ",".join(self.hosts)]
        if setup.binding != NONE:
            words += ["--bind-to", setup.binding]
        return words + ["--horovod"] * self.horovod + ["--shard-optimizer"] * self.shard_optimizer

    def here(self) -> TimedProcess:
        """Return what this process is to be, a rank that npurun has started on a host."""
        # The files lie in the folder of the rank table, which npurun removes.
        directory = Path(os.environ["RANK_TABLE_FILE"]).with_name("speed")
        return replace(self, directory=str(directory), rank=int(os.environ["RANK_ID"]))

    def run_of(self, setup: Setup, round_name: str) -> list[TimedProcess]:
        """Return the processes of a run in a round."""
        run = replace(
            self,
            run=f"{setup.ranks}-{setup.binding}.{round_name}",
            round=round_name,
            **setup._asdict(),
        )
        return [replace(run, rank=rank) for rank in range(setup.ranks)]


@dataclass(frozen=True)
class Times:
    """What a process has measured: ``steps`` took ``seconds``, and had ``rows`` of samples, if they were counted;
    in the first round also its ``memory``, in bytes.
    """

    steps: int
    seconds: float
    rows: int | None = None
    memory: int = 0


def save_times(process: PlannedProcess, times: Times) -> None:
    write_whole(process.folder / _TIMES, json.dumps(vars(times)).encode())


def load_times(process: PlannedProcess) -> Times | None:
    """Return the times of a process; None if it has left none."""
    path = process.folder / _TIMES
    if not path.exists():
        return None
    return Times(**json.loads(path.read_bytes()))


def finish(process: TimedProcess) -> None:
    """Tell that a process is timed; a rank of ``npurun --hosts`` prints all that it leaves."""
    (process.folder / DONE).touch()
    if process.is_on_hosts:
        files = {
            str(path.relative_to(process.directory)): path.read_text()
            for path in (process.folder / _TIMES, process.trace_file, process.folder / DONE)
            if path.exists()
        }
        # Written in one call, as other output of the script may come at any time.
        os.write(1, f"\n{_MARK}{json.dumps(files)}\n".encode())


def keep_report(process: PlannedProcess, line: str) -> bool:
    """Keep the files that a rank on a host has printed; return False for any other line."""
    _, mark, text = line.partition(_MARK)
    files = json.loads(text or "{}")
    for name, content in files.items():
        path = Path(process.directory, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return bool(mark)
