"""The measurements and the machine: the records behind the table, the picture and ``results.json``."""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import platform
import statistics
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.cores import STATES, UNKNOWN
from benchmarks.sides import version
from npu_device._src.version import __version__

NOT_INSTALLED = "not installed"
"""How the error of a rival begins whose package isn't there."""

FILE = "results.json"

_VECTORS = ("avx512f", "avx2", "avx")  # as /proc/cpuinfo writes them, the widest ones first
_PACKAGES = ("tensorflow", "tf-keras", "numpy", "torch", "mpich", "mpi4py")


@dataclass
class Timing:
    """One rival in one round.

    Attributes:
        rival: its label.
        seconds: a step's time on the slowest rank, one entry per repetition.
        error: the reason if there are no times.
        core_seconds: of processor time that a rank spends on a step, the mean of the ranks.
    """

    rival: str
    seconds: list[float] = field(default_factory=list)
    error: str | None = None
    core_seconds: list[float] = field(default_factory=list)

    @property
    def median(self) -> float | None:
        """Return the median in seconds; None for a rival that failed."""
        return statistics.median(self.seconds) if self.seconds and self.error is None else None


@dataclass
class RoundResult:
    """Rivals that ran in turn; ``size`` in bytes or samples, ``steps`` timed in one go, ``gbit`` Gbit/s of a link."""

    label: str
    size: int
    steps: int
    timings: list[Timing]
    gbit: float | None = None

    def timing(self, rival: str) -> Timing | None:
        """Return a rival's times; None when it took no part."""
        return next((timing for timing in self.timings if timing.rival == rival), None)

    def median(self, rival: str) -> float | None:
        """Return the seconds of a step; None when the rival failed or took no part."""
        timing = self.timing(rival)
        return None if timing is None else timing.median


@dataclass
class CaseResult:
    """A case on a number of ranks, in one state of the cores.

    Attributes:
        cores: the state, before and after each timing; see ``cores``.
        nanoseconds: the median distance of the cores in this state; None if the state didn't occur.
        earlier: the date and the commit of an earlier run of which this case is; "" for those of the results.
    """

    case: str
    title: str
    ranks: int
    rounds: list[RoundResult]
    cores: str = UNKNOWN
    nanoseconds: float | None = None
    earlier: str = ""

    def rivals(self) -> list[str]:
        """Return the labels of those that took part in any round."""
        return list(
            dict.fromkeys(timing.rival for one_round in self.rounds for timing in one_round.timings)
        )


@dataclass(frozen=True)
class Gain:
    """What ``npurun speed`` found for a case of ``gaining.py``: samples, or steps, per second of one process and of the
    ranks; how many times as fast they are, with the spread.
    """

    case: str
    keras: str
    ranks: int
    single: float
    together: float
    ratio: float
    low: float
    high: float
    verdict: str
    date: str
    processor: str


@dataclass(frozen=True)
class Machine:
    """The hardware and software of the measurement."""

    cpu: str
    cores: int
    memory_gib: float
    system: str
    python: str
    versions: dict[str, str]

    @property
    def processor(self) -> str:
        """Return the number of cores and their kind."""
        return f"{self.cores} cores of {self.cpu}"

    def line(self) -> str:
        """Return the same in one line."""
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        hardware = f"{self.processor}, {self.memory_gib:.0f} GiB"
        return f"{hardware}, {self.system}, Python {self.python}, {versions}"


@dataclass
class Results:
    """A whole run: one machine, one day, one commit of one version. It may also have cases of earlier runs."""

    machine: Machine
    date: str
    version: str
    commit: str
    cases: list[CaseResult] = field(default_factory=list)
    gains: list[Gain] = field(default_factory=list)

    def of(self, case: str) -> list[CaseResult]:
        """Return the results of a case, by number of ranks and state of the cores."""
        cases = [each for each in self.cases if each.case == case]
        return sorted(cases, key=lambda each: (each.ranks, STATES.index(each.cores)))

    def in_state(self, case: str, state: str) -> list[CaseResult]:
        """Return the results of a case in one state of the cores, by number of ranks."""
        return [each for each in self.of(case) if each.cores == state]

    def states(self, *cases: str) -> list[str]:
        """Return the states of the cores for which there are results of any of some cases."""
        found = {each.cores for case in cases for each in self.of(case)}
        return [state for state in STATES if state in found]

    def with_others_of(self, other: Results | None) -> Results:
        """Return these results with those of other cases of the same version, marked with their run and processor."""
        if other is None or other.version != self.version:
            return self
        own = {(each.case, each.ranks) for each in self.cases}
        run = "" if other.run == self.run else other.run
        if other.machine.processor != self.machine.processor:
            run = f"{other.run}, {other.machine.processor}"
        others = [
            dataclasses.replace(each, earlier=each.earlier or run)
            for each in other.cases
            if (each.case, each.ranks) not in own
        ]
        gains = self.gains or other.gains
        return dataclasses.replace(self, cases=[*others, *self.cases], gains=gains)

    @property
    def run(self) -> str:
        """Return the day and the commit."""
        return f"{self.date}, commit {self.commit}"

    def write(self, path: Path) -> None:
        """Write the run as JSON, with a line for each case."""
        path.parent.mkdir(parents=True, exist_ok=True)
        found = dataclasses.asdict(self)
        cases = ",\n".join(json.dumps(case) for case in found.pop("cases"))
        path.write_text(f'{json.dumps(found)[:-1]}, "cases": [\n{cases}\n]}}\n')


def read(path: Path) -> Results | None:
    """Return the results in a file; None if there is none, or if they are of another version of the package."""
    if not path.exists():
        return None
    found = json.loads(path.read_text())
    for case in found["cases"]:
        for each in case["rounds"]:
            each["timings"] = [Timing(**timing) for timing in each["timings"]]
        case["rounds"] = [RoundResult(**each) for each in case["rounds"]]
    found["cases"] = [CaseResult(**case) for case in found["cases"]]
    found["gains"] = [Gain(**gain) for gain in found.get("gains", [])]
    results = Results(**{**found, "machine": Machine(**found["machine"])})
    return results if results.version == __version__ else None


def begin() -> Results:
    """Return an empty run on this machine, today."""
    return Results(_machine(), datetime.date.today().isoformat(), __version__, _commit())


def _commit() -> str:
    """Return the last commit of the code, whatever has changed in the documentation since."""
    root, code = (
        Path(__file__).parents[1],
        ["npu_device", "hccl", "npu_bridge", "benchmarks", f":!benchmarks/{FILE}"],
    )
    last, changes = (
        subprocess.run(
            ["git", *words, "--", *code], cwd=root, capture_output=True, text=True, check=False
        ).stdout
        for words in (
            ["log", "-1", "--format=%h"],
            ["status", "--porcelain", "--untracked-files=no"],
        )
    )
    return f"{last.strip() or 'unknown'}{' with changes' if changes else ''}"


def _machine() -> Machine:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    system = f"{platform.system()} {platform.release().split('-')[0]}"
    versions = {name: found for name in _PACKAGES if (found := version(name)) is not None}
    cores = len(os.sched_getaffinity(0))
    return Machine(
        _cpu_model(), cores, round(memory, 1), system, platform.python_version(), versions
    )


def _cpu_model() -> str:
    """Return the processor's name with its widest vector instructions: they decide how long a step computes."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    fields = {
        name.strip(): content.strip()
        for name, _, content in (line.partition(":") for line in lines)
    }
    instructions = fields.get("flags", "").split()
    widest = next((f" ({each})" for each in _VECTORS if each in instructions), "")
    return f"{fields.get('model name', platform.machine())}{widest}"
