"""What the runs of ``npurun speed`` show: a table, a verdict for each number of ranks, and what would help."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from npu_device._src.report.analysis import Analysis, analyse
from npu_device._src.speed.timed_process import (
    TRACED,
    Setup,
    TimedProcess,
    Times,
    load_left_out,
    load_lost_cores,
    load_times,
)
from npu_device._src.trace.records import read
from npu_device._src.wording import counted

LEAST_ROUNDS = 5
"""With fewer, nothing is called faster or slower."""

_DOUBT = 0.08
"""The chance that the spread misses the true median, at most: with five rounds, the spread is all of them."""

_OUT_OF_STEP = 1.2  # times as many steps a second as another rank
_TOLERANCE = 0.25  # part of the rows of a batch, whose last batch may be shorter
_WORTH_IT = 1.05  # the gain from which something is recommended
_DISTURBED = 0.1  # cores that other programs take, from which they may have decided
_NETWORK = 0.2e9  # bytes a second between hosts: what is slower is bound by the network, whatever the engine
_TCP = 0.45  # part of the time of TensorFlow's ring, for 100 MiB at 10 Gbit/s (docs/benchmarks.md)


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
    parts: dict[str, float] = field(default_factory=dict)

    @property
    def label(self) -> str:
        return Setup(self.ranks, self.binding).label


@dataclass(frozen=True)
class Outcome:
    """All that is said.

    Attributes:
        left_out: why numbers of ranks weren't measured.
        lost_cores: how many cores other programs took that the runs lacked.
        problem: why the script can't be measured, "" if it can.
    """

    speedups: list[Speedup]
    left_out: dict[str, str]
    batch: str
    advice: list[str]
    lost_cores: float
    problem: str = ""


def outcome(start: TimedProcess, planned_setups: Sequence[Setup]) -> Outcome:
    """Return what the rounds show that are complete."""
    left_out = load_left_out(start)
    setups = [setup for setup in planned_setups if setup.label not in left_out]
    rounds = _complete_rounds(start, setups)
    rows = {setup: _rows(start, setup) for setup in setups}
    rows_of_one = rows[setups[0]]
    kinds = {setup: _kind_of_batch(start, rows_of_one, rows[setup], setup) for setup in setups[1:]}
    lost_cores = max((_lost_cores(start, setup, len(rounds)) for setup in setups), default=0.0)
    speedups = []
    if rounds:
        for setup in setups:
            # Divided by the samples of a step, of which there are more with a batch per rank.
            batches_per_step = 1
            if kinds.get(setup) in (_PER_RANK, _UNKNOWN_PER_RANK):
                batches_per_step = setup.ranks
            speedups.append(
                _speedup(start, setup, rounds, batches_per_step, rows_of_one, lost_cores)
            )
    advice = _choice(start, speedups)
    # Remedies are for the number of ranks that is the fastest so far.
    best = max(speedups[1:], key=lambda speedup: speedup.ratio, default=None)
    if best is not None:
        setup = Setup(best.ranks, best.binding)
        advice += _what_would_help(start, setup, kinds[setup])
    problems = [
        _problem(start, setup, rows_of_one, rows[setup], kind) for setup, kind in kinds.items()
    ]
    problem = next(filter(None, problems), "")
    batch = next(iter(kinds.values()), _UNKNOWN)
    return Outcome(speedups, left_out, batch, advice, lost_cores, problem)


def _lost_cores(start: TimedProcess, setup: Setup, rounds: int) -> float:
    """Return how many cores other programs took from the runs with a number of ranks."""
    runs = [start.run_of(setup, str(number + 1))[0] for number in range(rounds)]
    return statistics.median([load_lost_cores(run) for run in runs] or [0.0])


def _problem(
    start: TimedProcess, setup: Setup, rows_of_one: float | None, rows: float | None, kind: str
) -> str:
    """Return why the runs of a number of ranks can't be compared with one process; "" if they can."""
    if kind == _DIFFERENT:
        return (
            f"the batches of {setup.ranks} ranks have {rows:.4g} rows a step, and those of one process "
            f"{rows_of_one:.4g}: nothing can be compared unless that is the same, or the batch of each rank"
        )
    times = _times_of_run(start, setup, TRACED) or []
    # Ranks that reduce gradients make their steps together.
    if times and not start.run_of(setup, TRACED)[0].trace_file.exists():
        return (
            f"the script doesn't open npu_device on {setup.ranks} ranks, so that each trains a model of its own.\n"
            "What to do: give --replicate or --horovod, or see what npurun port shows"
        )
    speeds = [rank.steps / rank.seconds for rank in times]
    if speeds and max(speeds) > _OUT_OF_STEP * min(speeds):
        return (
            f"the {setup.ranks} ranks make different numbers of steps in the same time, {min(speeds):.3g} to "
            f"{max(speeds):.3g} a second: they don't train together. What to do: npurun verify shows why"
        )
    return ""


def _speedup(
    start: TimedProcess,
    setup: Setup,
    rounds: Sequence[Mapping[Setup, float]],
    batches_per_step: int,
    rows: float | None,
    lost_cores: float,
) -> Speedup:
    """Return a line of the table; ``batches_per_step`` counts batches of the size that one process has."""
    single = Setup(1)
    ratios = sorted(batches_per_step * times[single] / times[setup] for times in rounds)
    low, high = spread(ratios)
    rate = 1 / statistics.median(times[setup] for times in rounds)
    samples = None
    if rows is not None:
        samples = batches_per_step * rows * rate
    memory = sum(rank.memory for rank in _times_of_run(start, setup, TRACED) or ())
    verdict = _verdict(low, high, len(rounds), lost_cores)
    parts = _parts(_analysis(start, setup))
    ratio = statistics.median(ratios)
    place = (setup.ranks, setup.binding, len(rounds))
    return Speedup(*place, rate, samples, ratio, low, high, verdict, memory, parts)


def spread(ratios: Sequence[float]) -> tuple[float, float]:
    """Return a confidence interval of the median of sorted ratios, between two of them."""
    # Each ratio is above or below the true median with the same chance, whatever disturbs the machine.
    count = len(ratios)
    outside = 0  # the number of ratios at each end that the interval leaves out
    chance = 0.0
    for below in range((count - 1) // 2):
        chance += 2 * math.comb(count, below) / 2**count
        if chance > _DOUBT:
            break
        outside = below
    return ratios[outside], ratios[-1 - outside]


def _verdict(low: float, high: float, rounds: int, lost_cores: float) -> str:
    if rounds < LEAST_ROUNDS or low <= 1 <= high:
        return ""
    if low > 1 + _disturbance(lost_cores):
        return "faster"
    # A rank that shares its core holds up all others, and the more often the shorter the steps are.
    if high < 1 and lost_cores < _DISTURBED:
        return "slower"
    return ""


def _disturbance(lost_cores: float) -> float:
    """Return by which part of its time other programs can have held up one process."""
    if lost_cores < _DISTURBED:
        return 0.0
    # A thread that shares its core takes up to twice the time.
    return min(1.0, lost_cores)


def _complete_rounds(start: TimedProcess, setups: Sequence[Setup]) -> list[dict[Setup, float]]:
    """Return the seconds of a step in each round that all numbers of ranks have made."""
    rounds: list[dict[Setup, float]] = []
    while True:
        times = {setup: _seconds(start, setup, str(len(rounds) + 1)) for setup in setups}
        # The time may have ended in the middle of a round.
        complete = {setup: seconds for setup, seconds in times.items() if seconds is not None}
        if len(complete) < len(setups):
            return rounds
        rounds.append(complete)


def _seconds(start: TimedProcess, setup: Setup, round_name: str) -> float | None:
    """Return the seconds of a step in a run: those of its slowest rank."""
    times = _times_of_run(start, setup, round_name)
    if times is None:
        return None
    # Ranks end their steps together, but may see that at different times.
    return max(rank.seconds / rank.steps for rank in times)


def _rows(start: TimedProcess, setup: Setup) -> float | None:
    """Return the rows of a step of all ranks, if the script calls Keras models."""
    times = _times_of_run(start, setup, TRACED)
    if times is None:
        return None
    # A model that one rank doesn't call has no rows there.
    rows = [rank.rows / rank.steps for rank in times if rank.rows is not None]
    if len(rows) < setup.ranks:
        return None
    return sum(rows)


def _times_of_run(start: TimedProcess, setup: Setup, round_name: str) -> list[Times] | None:
    """Return the times of all ranks; None unless each has left some."""
    times = [load_times(process) for process in start.run_of(setup, round_name)]
    complete = [rank for rank in times if rank is not None]
    if len(complete) < setup.ranks:
        return None
    return complete


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


def _kind_of_batch(
    start: TimedProcess, single: float | None, together: float | None, setup: Setup
) -> str:
    """Return what becomes of the batch on several ranks, from the rows of a step."""
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


def _analysis(start: TimedProcess, setup: Setup) -> Analysis | None:
    """Return what the trace of a run shows; None for one process, or where nothing was reduced."""
    try:
        traces = read(start.run_of(setup, TRACED)[0].trace)
        if traces:
            return analyse(traces)
    except ValueError:
        pass
    return None


def _parts(analysis: Analysis | None) -> dict[str, float]:
    """Return where the step of the rank goes for which the others wait."""
    if analysis is None:
        return {}
    busiest = max(analysis.ranks, key=lambda rank: rank.busy)
    idlest = min(analysis.ranks, key=lambda rank: rank.busy)
    computing = busiest.alone + busiest.hidden
    # The rank that is ready first waits for the busiest one.
    waiting = busiest.busy - idlest.busy
    microseconds = {
        "input": busiest.input_wait,
        "computing": computing,
        "update": busiest.update,
        "communication": busiest.exposed,
        "waiting": waiting,
    }
    return {name: time / 1e3 for name, time in microseconds.items()}


# What would help


def _choice(start: TimedProcess, speedups: Sequence[Speedup]) -> list[str]:
    """Return which number of ranks to choose, if that is certain."""
    faster = [speedup for speedup in speedups if speedup.verdict == "faster"]
    if faster:
        best = max(faster, key=lambda speedup: speedup.ratio)
        words = start.launch_words(best.ranks, best.binding)
        return [f"npurun {' '.join(words)}: {best.ratio:.2f} times as fast as one process"]
    if speedups[1:] and all(speedup.verdict == "slower" for speedup in speedups[1:]):
        return ["stay with one process: it is faster than any number of ranks that was measured"]
    return []


def _what_would_help(start: TimedProcess, setup: Setup, batch: str) -> list[str]:
    """Return remedies whose gain the trace of a run lets expect."""
    analysis = _analysis(start, setup)
    if analysis is None:
        return []
    busiest = max(analysis.ranks, key=lambda rank: rank.busy)
    trace = analysis.traces[0]
    others = 1 - 1 / setup.ranks  # the fraction of the batch on the other ranks
    savings = {}
    # With a batch per rank, the input is divided already.
    if batch not in (_PER_RANK, _UNKNOWN_PER_RANK):
        savings["npu.distribute.pipeline, which prepares only a rank's rows (docs/input.md)"] = (
            others * busiest.input_wait
        )
    if not start.shard_optimizer:
        savings["--shard-optimizer (docs/faster.md)"] = others * busiest.update
    if len(trace.segments) == 1 < len(trace.gradients):
        # Reductions of segments hide in the backward pass, but the last one can't.
        savings["NPU_DEVICE_SPLIT=25%,25%,25%,25%, four segments (docs/faster.md)"] = min(
            0.75 * busiest.exposed, busiest.alone
        )
    hosts = len({trace.host for trace in analysis.traces})
    size = sum(gradient.bytes for gradient in trace.gradients)
    sending = (busiest.hidden + busiest.exposed) * 1e-6
    if hosts > 1 and trace.backend == "tensorflow" and size > _NETWORK * sending:
        savings["NPU_DEVICE_BACKEND=tcp (docs/engines.md)"] = (1 - _TCP) * busiest.exposed
    return [
        f"{remedy}: up to {gain:.2f} times as fast on {setup.ranks} ranks"
        for remedy, saved in savings.items()
        if (gain := busiest.step / max(busiest.step - saved, 1e-9)) >= _WORTH_IT
    ]


def text(measured: Outcome, steps: int) -> str:
    """Return the table, with what was measured above it, and advice below."""
    parts = list(next((speedup.parts for speedup in measured.speedups if speedup.parts), {}))
    head = ["ranks", "samples/s", "steps/s", "speedup", "spread", "", "memory", *parts]
    rows = [head]
    for speedup in measured.speedups:
        # One process has no parts: only reductions are traced.
        times = [f"{speedup.parts[name]:.1f}" if speedup.parts else "" for name in parts]
        rows.append([*_cells(speedup), *times])
    widths = [max(map(len, column)) for column in zip(*rows)]
    table = ["  ".join(map(str.rjust, row, widths)).rstrip() for row in rows]
    rounds = max((speedup.rounds for speedup in measured.speedups), default=0)
    notes = [
        f"medians of {counted(rounds, 'round')} of at least {steps} steps",
        *measured.batch.split("; "),
    ]
    if parts:
        notes.append(
            "parts of a step in ms, from a run that is traced, of the rank for which the others wait"
        )
    if measured.speedups[1:] and not parts:
        notes.append("no rank reduced gradients; npurun verify tells whether they train together")
    if measured.lost_cores >= _DISTURBED:
        notes.append(
            f"other programs took {measured.lost_cores:.1f} cores that the runs lacked: only speedups above "
            f"{1 + _disturbance(measured.lost_cores):.2f} are decided; end those programs, and measure again"
        )
    notes += [f"not measured on {ranks} ranks: {why}" for ranks, why in measured.left_out.items()]
    return "\n".join([*notes, "", *table, "", *measured.advice]).rstrip()


def _cells(speedup: Speedup) -> list[str]:
    samples = "-"
    if speedup.samples_per_second is not None:
        samples = f"{speedup.samples_per_second:.1f}"
    cells = [
        speedup.label,
        samples,
        f"{speedup.steps_per_second:.3g}",
    ]
    if speedup.ranks == 1:
        cells += ["1", "", ""]
    else:
        spread_text = f"{speedup.low:.2f} to {speedup.high:.2f}"
        cells += [f"{speedup.ratio:.2f}", spread_text, speedup.verdict or "undecided"]
    return [*cells, f"{speedup.memory / 2**30:.1f} GiB"]
