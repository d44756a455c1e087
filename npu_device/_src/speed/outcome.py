"""What the runs of ``npurun speed`` show: a table, a verdict for each number of ranks, and what would help."""

from __future__ import annotations

import contextlib
import itertools
import math
import pickle
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from npu_device._src.report.analysis import (
    NETWORK,
    Analysis,
    analyse,
    saved_by_dividing,
    sent_per_second,
)
from npu_device._src.speed.timed_process import Setup, TimedProcess, Times, load_times
from npu_device._src.trace.records import read
from npu_device._src.whole_files import write_whole
from npu_device._src.wording import counted

LEAST_ROUNDS = 5
"""With fewer, nothing is called faster or slower."""

_DEVIATIONS = 1.75
"""Of the normal distribution, for a chance of 8 % that the spread misses the true median. With five rounds, the spread
is all of them."""

_WIDTH = 0.02  # fraction of a speedup by which its spread may be wider with each round
_OUT_OF_STEP = 1.2  # times as many steps a second as another rank
_TOLERANCE = 0.15  # fraction of the rows of a batch, whose last batch may be shorter
_WORTH_IT = 1.05  # the gain from which something is recommended
_DISTURBED = 0.1  # cores that other programs take, from which they may have decided
_SMALL = 1 << 20  # bytes of gradients that aren't worth segments
# Fraction of the time of TensorFlow's ring, for 100 MiB at 10 Gbit/s (docs/benchmarks.md).
_TCP = 0.45
_FILE = "outcome.pickle"

_COUNTED = (
    "samples are rows of the first input of the Keras models that were called under a gradient tape"
)
_GLOBAL = f"the global batch is the same; {_COUNTED}"
_PER_RANK = (
    f"the batch is per rank, so that N ranks train N times as many samples in a step; {_COUNTED}"
)
_NO_MODEL = "no Keras model was called, so that samples aren't counted"
_UNKNOWN = f"{_NO_MODEL}; the global batch is taken to be the same"
_UNKNOWN_PER_RANK = f"{_NO_MODEL}; the batch is taken to be per rank, as Horovod has it"
_DIFFERENT = "different"


class Run(NamedTuple):
    """What the ranks of a setup have measured in a round.

    Attributes:
        times: of all ranks.
        lost_cores: how many cores other programs took that the run lacked.
        joined: rank 0 has opened npu_device. This and ``analysis`` are known of the first round, which is traced.
        analysis: where the time of a step goes; None for one process, or where nothing was reduced.
    """

    times: Sequence[Times]
    lost_cores: float
    joined: bool
    analysis: Analysis | None

    @property
    def speeds(self) -> list[float]:
        """Return the steps of each rank in a second."""
        return [rank.steps / rank.seconds for rank in self.times]

    @property
    def seconds(self) -> float:
        """Return the seconds of a step: those of the slowest rank."""
        # Ranks end their steps together, but may see that at different times.
        return 1 / min(self.speeds)

    @property
    def rows(self) -> float | None:
        """Return the rows of a step of all ranks, if the script calls Keras models."""
        # A model that one rank doesn't call has no rows there.
        rows = [rank.rows / rank.steps for rank in self.times if rank.rows]
        if len(rows) < len(self.times):
            return None
        return sum(rows)


def run_of(processes: Sequence[TimedProcess], lost_cores: float) -> Run | None:
    """Return what the processes of a run have left; None unless each has left times."""
    times = list(filter(None, map(load_times, processes)))
    if len(times) < len(processes):
        return None
    analysis = None
    # There may be no trace, or one without steps that all ranks have made.
    with contextlib.suppress(ValueError):
        traces = read(processes[0].trace)
        if traces:
            analysis = analyse(traces)
    return Run(times, lost_cores, processes[0].trace_file.exists(), analysis)


@dataclass(frozen=True)
class Speedup:
    """A line of the table: a number of ranks, bound to cores or not.

    Attributes:
        ratio: the speedup over one process, for the same number of samples: the median of all rounds.
        low, high: its spread.
        verdict: "faster", "slower", or "" if the spread covers 1 or there were too few rounds.
        memory: of all ranks, in bytes.
        parts: where the time of a step goes, in ms, in a run that is traced.
    """

    ranks: int
    binding: str
    rounds: int
    steps_per_second: float
    samples_per_second: float | None
    ratio: float
    low: float
    high: float
    verdict: str
    memory: int
    parts: dict[str, float]

    @property
    def setup(self) -> Setup:
        return Setup(self.ranks, self.binding)

    @property
    def is_settled(self) -> bool:
        """Return True if few rounds were wanted, or more would change neither the verdict nor, by much, the ratio."""
        if self.rounds < LEAST_ROUNDS:
            return True
        if self.low <= 1 <= self.high:
            return False
        # 10 % after five rounds, and not so many rounds that they would never end on a noisy machine.
        return self.high - self.low <= _WIDTH * self.rounds * self.ratio


@dataclass(frozen=True)
class Outcome:
    """All that is said.

    Attributes:
        left_out: why numbers of ranks weren't measured.
        lost_cores: how many cores other programs took that the runs lacked.
        problem: why the script can't be measured, "" if it can.
    """

    speedups: list[Speedup]
    left_out: Mapping[str, str]
    batch: str
    advice: list[str]
    lost_cores: float
    problem: str = ""

    def save(self, directory: Path) -> None:
        """Keep it where npurun finds it at the end of all runs."""
        write_whole(directory / _FILE, pickle.dumps(self))


def load(directory: Path) -> Outcome:
    """Return the latest outcome that was kept; an empty one before the first run has ended."""
    path = directory / _FILE
    if not path.exists():
        return Outcome([], {}, _UNKNOWN, [], 0.0)
    return pickle.loads(path.read_bytes())


def outcome(
    start: TimedProcess, runs: Mapping[Setup, Sequence[Run]], left_out: Mapping[str, str]
) -> Outcome:
    """Return what runs show, of which each setup's first one is traced; there is one of one process, at least."""
    measured = {setup: series for setup, series in runs.items() if setup.label not in left_out}
    # The time may have ended in the middle of a round.
    complete = min(map(len, measured.values()))
    single = measured[Setup(1)][:complete]
    rows = single[0].rows
    # What other programs took from the setup that lacked most.
    lost_cores = max(
        statistics.median(run.lost_cores for run in series) for series in measured.values()
    )
    speedups = []
    problem = ""
    # All numbers of ranks have the same kind of batch, or there is a problem.
    for setup, series in measured.items():
        batch = _batch(start, setup, rows, series[0].rows)
        problem = problem or _problem(setup, series, rows, batch)
        if single[1:]:
            speedups.append(_speedup(setup, series, single, batch, lost_cores))
    by_ratio = sorted(speedups[1:], key=lambda speedup: speedup.ratio, reverse=True)
    advice = _choice(start, by_ratio)
    # Remedies are for the number of ranks that is the fastest so far, and follow from the times of its step.
    if by_ratio and lost_cores < _DISTURBED:
        best = by_ratio[0].setup
        advice += _what_would_help(start, best, measured[best][0].analysis, batch)
    return Outcome(speedups, left_out, batch, advice, lost_cores, problem)


def _batch(start: TimedProcess, setup: Setup, single: float | None, together: float | None) -> str:
    """Return what becomes of the batch in a setup, from the rows of a step."""
    if single is None or together is None:
        if start.horovod:
            return _UNKNOWN_PER_RANK
        return _UNKNOWN
    ratio = together / single
    if abs(ratio - 1) < _TOLERANCE:
        return _GLOBAL
    if abs(ratio - setup.ranks) < _TOLERANCE * setup.ranks:
        return _PER_RANK
    return _DIFFERENT


def _problem(setup: Setup, runs: Sequence[Run], rows_of_one: float | None, batch: str) -> str:
    """Return why runs, of which the first is traced, can't be compared with one process; "" if they can."""
    run = runs[0]
    if batch == _DIFFERENT:
        return (
            f"the batches of {setup.ranks} ranks have {run.rows:.4g} rows a step, and those of one process "
            f"{rows_of_one:.4g}: nothing can be compared unless that is the same, or the batch of each rank"
        )
    # Ranks that reduce gradients make their steps together.
    if setup.ranks > 1 and not run.joined:
        return (
            f"the script doesn't open npu_device on {setup.ranks} ranks, so that each trains a model of its own.\n"
            "What to do: give --replicate or --horovod, or see what npurun port shows"
        )
    # Ranks begin to time at different moments, so that other programs may make a run seem so.
    if runs[1:] and all(
        run.lost_cores < _DISTURBED and max(run.speeds) > _OUT_OF_STEP * min(run.speeds)
        for run in runs
    ):
        return (
            f"the {setup.ranks} ranks make different numbers of steps in the same time, {min(run.speeds):.3g} to "
            f"{max(run.speeds):.3g} a second: they don't train together. What to do: npurun verify shows why"
        )
    return ""


def _speedup(
    setup: Setup, runs: Sequence[Run], single: Sequence[Run], batch: str, lost_cores: float
) -> Speedup:
    """Return a line of the table, from the runs of a setup and those of one process in the same rounds."""
    batches_per_step = 1
    # Divided by the samples of a step, of which there are more with a batch per rank.
    if batch in (_PER_RANK, _UNKNOWN_PER_RANK):
        batches_per_step = setup.ranks
    seconds = [(base.seconds, run.seconds) for base, run in zip(single, runs)][1:]
    ratios = sorted(batches_per_step * base / together for base, together in seconds)
    low, high = spread(ratios)
    rate = 1 / statistics.median(together for _, together in seconds)
    samples = None
    if single[0].rows is not None:
        samples = batches_per_step * single[0].rows * rate
    return Speedup(
        ranks=setup.ranks,
        binding=setup.binding,
        rounds=len(ratios),
        steps_per_second=rate,
        samples_per_second=samples,
        ratio=statistics.median(ratios),
        low=low,
        high=high,
        verdict=_verdict(low, high, len(ratios), lost_cores),
        memory=sum(rank.memory for rank in runs[0].times),
        parts=_parts(runs[0].analysis),
    )


def spread(ratios: Sequence[float]) -> tuple[float, float]:
    """Return a confidence interval of the median of sorted ratios, between two of them."""
    # Each ratio is above or below the true median with the same chance, whatever disturbs the machine. So the number of
    # those below is binomial, with a deviation of half the root of the count.
    count = len(ratios)
    outside = max(0, int((count - 1 - _DEVIATIONS * math.sqrt(count)) / 2))
    return ratios[outside], ratios[-1 - outside]


def _verdict(low: float, high: float, rounds: int, lost_cores: float) -> str:
    if rounds < LEAST_ROUNDS or low <= 1 <= high:
        return ""
    # A thread that shares its core takes up to twice the time.
    if low > 1 + min(1.0, lost_cores):
        return "faster"
    # A rank that shares its core holds up all others, and the more often the shorter the steps are.
    if high < 1 and lost_cores < _DISTURBED:
        return "slower"
    return ""


def _parts(analysis: Analysis | None) -> dict[str, float]:
    """Return where the step of the rank goes for which the others wait."""
    if analysis is None:
        return {}
    busiest = analysis.busiest
    microseconds = {
        "input": busiest.input_wait,
        "computing": busiest.alone + busiest.hidden,
        "update": busiest.update,
        # With divided updates, the ranks exchange new values, too.
        "communication": busiest.exposed + busiest.gather,
        # The rank that is ready first waits for the busiest one.
        "waiting": busiest.busy - min(rank.busy for rank in analysis.ranks),
    }
    return {name: time / 1e3 for name, time in microseconds.items()}


# What would help


def _choice(start: TimedProcess, by_ratio: Sequence[Speedup]) -> list[str]:
    """Return which number of ranks to choose, if that is certain; ``by_ratio`` begins with the fastest."""
    verdicts = [speedup.verdict for speedup in by_ratio]
    if "faster" in verdicts:
        best = by_ratio[verdicts.index("faster")]
        words = [*start.launch_words(best.setup), *["--replicate"] * start.replicates]
        return [f"npurun {' '.join(words)}: {best.ratio:.2f} times as fast as one process"]
    if set(verdicts) == {"slower"}:
        return ["stay with one process: it is faster than any number of ranks that was measured"]
    return []


def _what_would_help(
    start: TimedProcess, setup: Setup, analysis: Analysis | None, batch: str
) -> list[str]:
    """Return remedies whose gain the trace of a run lets expect."""
    if analysis is None:
        return []
    busiest = analysis.busiest
    trace = analysis.traces[0]
    savings = {}
    # With a batch per rank, the input is divided already.
    if batch in (_GLOBAL, _UNKNOWN):
        rows_of_others = 1 - 1 / setup.ranks  # fraction of the batch
        savings[
            "npu.distribute.pipeline, unless ranks prepare only their own rows (docs/input.md)"
        ] = rows_of_others * busiest.input_wait
    # The script may have an optimizer that can't be divided.
    if not start.shard_optimizer:
        savings["--shard-optimizer (docs/faster.md)"] = saved_by_dividing(analysis.traces, busiest)
    # A few bytes take as long as one.
    if trace.bytes > _SMALL and len(trace.segments) == 1 < len(trace.gradients):
        # Reductions of segments hide in the backward pass, but for the last segment.
        savings["NPU_DEVICE_SPLIT=25%,25%,25%,25%, four segments (docs/faster.md)"] = min(
            0.75 * busiest.exposed, busiest.alone
        )
    if trace.engine == "tensorflow" and sent_per_second(analysis.traces, busiest) > NETWORK:
        savings["NPU_DEVICE_BACKEND=tcp (docs/engines.md)"] = (1 - _TCP) * busiest.exposed
    return [
        f"{remedy}: up to {gain:.2f} times as fast on {setup.ranks} ranks"
        for remedy, saved in savings.items()
        if (gain := busiest.step / max(busiest.step - saved, 1e-9)) >= _WORTH_IT
    ]


def text(measured: Outcome, steps: int) -> str:
    """Return the table, with what was measured above it, and advice below."""
    speedups = measured.speedups
    parts = next((speedup.parts for speedup in speedups if speedup.parts), {})
    head = ["ranks", "samples/s", "steps/s", "speedup", "spread", "", "memory", *parts]
    rows = [head, *map(_cells, speedups)]
    widths = [max(map(len, column)) for column in itertools.zip_longest(*rows, fillvalue="")]
    table = ["  ".join(map(str.rjust, row, widths)).rstrip() for row in rows]
    notes = [
        f"medians of {counted(speedups[0].rounds, 'round')} of at least {steps} steps",
        *measured.batch.split("; "),
    ]
    if parts:
        notes.append(
            "parts of a step in ms, from a run that is traced, of the rank for which the others wait"
        )
    else:
        notes.append("no rank reduced gradients; npurun verify tells whether they train together")
    if measured.lost_cores >= _DISTURBED:
        notes.append(
            f"other programs took {measured.lost_cores:.1f} cores that the runs lacked: only speedups above "
            f"{1 + min(1.0, measured.lost_cores):.2f} are decided; end those programs, and measure again"
        )
    notes += [f"not measured on {ranks} ranks: {why}" for ranks, why in measured.left_out.items()]
    return "\n".join([*notes, "", *table, "", *measured.advice]).rstrip()


def _cells(speedup: Speedup) -> list[str]:
    samples = "-"
    if speedup.samples_per_second is not None:
        samples = f"{speedup.samples_per_second:.1f}"
    comparison = ["1", "", ""]
    if speedup.ranks > 1:
        comparison = [
            f"{speedup.ratio:.2f}",
            f"{speedup.low:.2f} to {speedup.high:.2f}",
            speedup.verdict or "undecided",
        ]
    return [
        speedup.setup.label,
        samples,
        f"{speedup.steps_per_second:.3g}",
        *comparison,
        f"{speedup.memory / 2**30:.1f} GiB",
        # One process has no such times: only reductions are traced.
        *(f"{time:.1f}" for time in speedup.parts.values()),
    ]
