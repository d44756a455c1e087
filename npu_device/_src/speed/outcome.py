"""What the runs of ``npurun speed`` show: a table, a verdict for each number of ranks, and what would help."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from npu_device._src.machine.core_sets import NONE
from npu_device._src.report.analysis import Analysis, analyse
from npu_device._src.speed.timed_process import (
    TRACED,
    Setup,
    TimedProcess,
    Times,
    load_memory,
    load_times,
)
from npu_device._src.trace.records import read

LEAST_ROUNDS = 5
"""With fewer, nothing is called faster or slower."""

_DOUBT = 0.08
"""The chance that the spread misses the true median, at most: with five rounds, the spread is all of them."""

_TOLERANCE = 0.25  # of the rows of a batch, whose last one may be shorter
_WORTH_IT = 1.05  # the gain from which something is recommended


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


@dataclass(frozen=True)
class Outcome:
    """All that is said. ``problem`` is why the script can't be measured, "" if it can."""

    speedups: list[Speedup]
    left_out: dict[str, str]  # why numbers of ranks weren't measured
    batch: str
    advice: list[str]
    problem: str = ""


def outcome(
    start: TimedProcess, setups: Sequence[Setup], left_out: Mapping[str, str] | None = None
) -> Outcome:
    """Return what the rounds show that are complete."""
    rounds = _complete_rounds(start, setups)
    rows = {setup: _rows(start, setup) for setup in setups}
    rows_of_one = rows[setups[0]]
    kinds = {setup: _kind_of_batch(rows_of_one, rows[setup], setup.ranks) for setup in setups[1:]}
    speedups = []
    advice = []
    if rounds:
        for setup in setups:
            # With a batch per rank, a step trains more samples.
            share = 1
            if kinds.get(setup) == _PER_RANK:
                share = setup.ranks
            speedups.append(_speedup(start, setup, rounds, share, rows_of_one))
    analysis = None
    if len(speedups) > 1:
        analysis = _analysis(start, setups[1])
    if analysis is not None:
        advice = _what_would_help(analysis, setups[1].ranks)
    problem = ""
    for setup, kind in kinds.items():
        if kind == _DIFFERENT:
            problem = (
                f"the batches of {setup.ranks} ranks have {rows[setup]:.4g} rows a step, and those of one process "
                f"{rows_of_one:.4g}: nothing can be compared unless that is the same, or the batch of each rank"
            )
    batch = next(iter(kinds.values()), _UNKNOWN)
    return Outcome(speedups, dict(left_out or {}), batch, [*_choice(speedups), *advice], problem)


def _speedup(
    start: TimedProcess,
    setup: Setup,
    rounds: Sequence[Mapping[Setup, float]],
    share: int,
    rows: float | None,
) -> Speedup:
    """Return a line of the table; ``share`` is how many times the samples of one process a step trains."""
    single = Setup(1)
    ratios = sorted(share * times[single] / times[setup] for times in rounds)
    low, high = spread(ratios)
    rate = 1 / statistics.median(times[setup] for times in rounds)
    samples = None
    if rows is not None:
        samples = share * rows * rate
    memory = load_memory(start.run_of(setup, "1")[0])
    verdict = _verdict(low, high, len(rounds))
    parts = _parts(_analysis(start, setup))
    ratio = statistics.median(ratios)
    place = (setup.ranks, setup.binding, len(rounds))
    return Speedup(*place, rate, samples, ratio, low, high, verdict, memory, parts)


def spread(ratios: Sequence[float]) -> tuple[float, float]:
    """Return a confidence interval of the median of sorted ratios, between two of them."""
    # Each ratio is above or below the true median with the same chance, whatever disturbs the machine.
    count = len(ratios)
    outside = 0  # ratios at each end that aren't in it
    chance = 0.0
    for below in range((count - 1) // 2):
        chance += 2 * math.comb(count, below) / 2**count
        if chance > _DOUBT:
            break
        outside = below
    return ratios[outside], ratios[-1 - outside]


def _verdict(low: float, high: float, rounds: int) -> str:
    if rounds < LEAST_ROUNDS or low <= 1 <= high:
        return ""
    if low > 1:
        return "faster"
    return "slower"


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


_GLOBAL = "the global batch is the same"
_PER_RANK = "the batch is per rank, so that N ranks train N times as many samples in a step"
_UNKNOWN = "no Keras model was called, so that samples aren't counted; the global batch is taken to be the same"
_DIFFERENT = "different"


def _kind_of_batch(single: float | None, together: float | None, ranks: int) -> str:
    """Return what becomes of the batch on several ranks, from the rows of a step."""
    if single is None or together is None:
        return _UNKNOWN
    ratio = together / single
    if abs(ratio - 1) < _TOLERANCE:
        return _GLOBAL
    if abs(ratio - ranks) < _TOLERANCE * ranks:
        return _PER_RANK
    return _DIFFERENT


def _analysis(start: TimedProcess, setup: Setup) -> Analysis | None:
    """Return what the trace of a run shows; None for one process, or where nothing was reduced."""
    try:
        return analyse(read(start.run_of(setup, TRACED)[0].trace))
    except ValueError:
        return None


_PARTS = ("input", "computing", "update", "communication", "waiting")


def _parts(analysis: Analysis | None) -> dict[str, float]:
    """Return where the step of the rank goes for which the others wait."""
    if analysis is None:
        return {}
    busiest = max(analysis.ranks, key=lambda rank: rank.busy)
    idlest = min(analysis.ranks, key=lambda rank: rank.busy)
    computing = busiest.alone + busiest.hidden
    # Of the rank that is ready first.
    waiting = busiest.busy - idlest.busy
    times = (busiest.input_wait, computing, busiest.update, busiest.exposed, waiting)
    return {name: microseconds / 1e3 for name, microseconds in zip(_PARTS, times)}


# What would help


def _choice(speedups: Sequence[Speedup]) -> list[str]:
    """Return which number of ranks to choose, if that is certain."""
    faster = [speedup for speedup in speedups if speedup.verdict == "faster"]
    if faster:
        best = max(faster, key=lambda speedup: speedup.ratio)
        option = f" --bind-to {best.binding}" * (best.binding != NONE)
        return [f"npurun -n {best.ranks}{option}: {best.ratio:.2f} times as fast as one process"]
    if speedups[1:] and all(speedup.verdict == "slower" for speedup in speedups[1:]):
        return ["stay with one process: it is faster than any number of ranks that was measured"]
    return []


def _what_would_help(analysis: Analysis, ranks: int) -> list[str]:
    """Return remedies whose gain the trace of a run lets expect."""
    busiest = max(analysis.ranks, key=lambda rank: rank.busy)
    step = busiest.step
    remedies = []
    for remedy, saved in (
        (
            "npu.distribute.pipeline, which prepares only a rank's rows (docs/input.md)",
            busiest.input_wait * (1 - 1 / ranks),
        ),
        ("segments and engines (docs/tuning.md)", busiest.exposed),
    ):
        if step / max(step - saved, 1e-9) >= _WORTH_IT:
            remedies.append(
                f"{remedy}: up to {step / max(step - saved, 1e-9):.2f} times as fast on {ranks} ranks"
            )
    return remedies


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
    notes = [f"medians of {rounds} rounds of at least {steps} steps; {measured.batch}"]
    if parts:
        notes.append(
            "parts of a step in ms, from a run that is traced, of the rank for which the others wait"
        )
    notes += [f"not measured on {ranks} ranks: {why}" for ranks, why in measured.left_out.items()]
    return "\n".join([*notes, "", *table, "", *measured.advice]).rstrip()


def _cells(speedup: Speedup) -> list[str]:
    samples = "-"
    if speedup.samples_per_second is not None:
        samples = f"{speedup.samples_per_second:.4g}"
    cells = [
        Setup(speedup.ranks, speedup.binding).label,
        samples,
        f"{speedup.steps_per_second:.3g}",
    ]
    if speedup.ranks == 1:
        cells += ["1", "", ""]
    else:
        spread_text = f"{speedup.low:.2f} to {speedup.high:.2f}"
        cells += [f"{speedup.ratio:.2f}", spread_text, speedup.verdict or "undecided"]
    return [*cells, f"{speedup.memory / 2**30:.1f} GiB"]
