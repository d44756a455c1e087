"""The results as Markdown tables."""

from __future__ import annotations

import math
import statistics
import textwrap
from collections.abc import Sequence

from benchmarks.cases import (
    ALONE,
    BY_SIZE,
    DEFAULT_SPLIT,
    EAGER,
    FUNCTION,
    GLOO,
    LINK_SIZES,
    LINK_STEPS,
    MIRRORED,
    MPICH,
    PAIRS,
    STEPS,
    TRACED,
    size_text,
)
from benchmarks.results import NOT_INSTALLED, CaseResult, Results, RoundResult, Timing

_FAILED = "failed"
_SHORT = {MIRRORED: "MWMS"}
_SMALLEST_BANDWIDTH = 1 << 16
_ERROR_WIDTH = 300
_WIDTH = 120
_OURS = (FUNCTION, EAGER)
_OTHERS = (MIRRORED, GLOO, MPICH)

Rows = list[list[str]]


def tables(results: Results) -> str:
    """Return the tables of all cases, and the machine."""
    repeats = "1 repetition" if results.repeats == 1 else f"{results.repeats} repetitions"
    head = f"Measured on {results.date}: {results.machine.line()}. Medians of {repeats}."
    return "\n\n".join([textwrap.fill(head, _WIDTH), *(_case_text(case) for case in results.cases)]) + "\n"


def _case_text(case: CaseResult) -> str:
    parts = [f"### {case.title}, {case.ranks} ranks", *_SHOWN[case.shows](case)]
    errors = dict.fromkeys(
        f"* {'' if _is_missing(timing) else one_round.label + ', '}{timing.rival}: "
        f"{textwrap.shorten(timing.error, _ERROR_WIDTH)}"
        for one_round in case.rounds
        for timing in one_round.timings
        if timing.error is not None
    )
    return "\n\n".join([*parts, "\n".join(errors)] if errors else parts)


def _by_size(case: CaseResult) -> list[str]:
    """Return times, bandwidths, and how much faster this package is."""
    labels = case.rivals()
    times = [["ms", *(_SHORT.get(label, label) for label in labels)]]
    speeds = [["GB/s", *(_SHORT.get(label, label) for label in labels)]]
    ratios = [["times as fast", *(f"{ours} : {_SHORT.get(other, other)}" for ours in _OURS for other in _OTHERS)]]
    for one_round in case.rounds:
        times.append([one_round.label, *(_milliseconds(one_round.timing(label)) for label in labels)])
        ratios.append([one_round.label, *(_ratio(one_round, other, ours) for ours in _OURS for other in _OTHERS)])
        if one_round.size >= _SMALLEST_BANDWIDTH:  # below this, only latency matters
            speeds.append([one_round.label, *(_bandwidth(one_round, label) for label in labels)])
    note = f"MWMS: {MIRRORED}. {FUNCTION}: shared memory, in a tf.function."
    return [note, _markdown(times), _markdown(speeds), _markdown(ratios)]


def _steps(case: CaseResult) -> list[str]:
    """Return one row per rival."""
    [one_round] = case.rounds
    rows = [["rival", "ms per step", "fastest … slowest", f"time ÷ {ALONE}", "step rate ÷ MWMS"]]
    for timing in one_round.timings:
        rival = timing.rival
        cells = [_milliseconds(timing), _range(timing), _ratio(one_round, rival, ALONE)]
        rows.append([rival, *cells, _ratio(one_round, MIRRORED, rival)])
    return [f"MWMS: {MIRRORED}.", _markdown(rows)]


def _pairs(case: CaseResult) -> list[str]:
    """Return how much tracing slows a step down, one row per round."""
    rows = [["step", "ms", "ms traced", "longer by", "ms longer"]]
    for one_round in case.rounds:
        both = [one_round.timing(label) for label in (DEFAULT_SPLIT, TRACED)]
        rows.append([one_round.label, *map(_milliseconds, both), *_differences(*both)])
    turns = max(len(timing.seconds) for one_round in case.rounds for timing in one_round.timings)
    return [
        f"The differences are medians of {turns} pairs of neighbouring turns, ± their standard errors.",
        _markdown(rows),
    ]


def _link_sizes(case: CaseResult) -> list[str]:
    """Return a table for each link; with the times of large sizes, the processor's."""
    parts = ["ms; in brackets the processor seconds that a rank spends for a GB."]
    for link in dict.fromkeys(one_round.label for one_round in case.rounds):
        columns = [one_round for one_round in case.rounds if one_round.label == link]
        rows = [[link, *(size_text(one_round.size) for one_round in columns)]]
        for label in case.rivals():
            rows.append([label, *(_with_core_seconds(one_round, label) for one_round in columns)])
        parts.append(_markdown(rows))
    return parts


def _with_core_seconds(one_round: RoundResult, label: str) -> str:
    timing = one_round.timing(label)
    if timing is None or timing.median is None or one_round.size < _SMALLEST_BANDWIDTH:
        return _milliseconds(timing)
    return f"{_milliseconds(timing)} ({statistics.median(timing.core_seconds) / one_round.size * 1e9:.1f})"


def _link_steps(case: CaseResult) -> list[str]:
    """Return a row for each rival and a column for each link."""
    rows = [["ms per step", *(one_round.label for one_round in case.rounds)]]
    for label in case.rivals():
        rows.append([label, *(_milliseconds(one_round.timing(label)) for one_round in case.rounds)])
    return [_markdown(rows)]


_SHOWN = {
    BY_SIZE: _by_size,
    STEPS: _steps,
    PAIRS: _pairs,
    LINK_SIZES: _link_sizes,
    LINK_STEPS: _link_steps,
}


def _differences(before: Timing | None, after: Timing | None) -> tuple[str, str]:
    """Return how much longer the second one takes than the first one, turn by turn: the share, and milliseconds."""
    if before is None or after is None or before.median is None or after.median is None:
        return _FAILED, _FAILED
    pairs = list(zip(before.seconds, after.seconds))
    share, share_error = _median([theirs / ours - 1 for ours, theirs in pairs])
    more, more_error = _median([(theirs - ours) * 1000 for ours, theirs in pairs])
    return f"{share:+.2%} ± {share_error:.2%}", f"{more:+.2f} ± {more_error:.2f}"


def _median(values: Sequence[float]) -> tuple[float, float]:
    """Return the median and its standard error: 1.25 standard deviations divided by the root of the count."""
    error = 1.25 * statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.inf
    return statistics.median(values), error


def _ratio(one_round: RoundResult, dividend: str, divisor: str) -> str:
    """Return one rival's time divided by another's."""
    above, below = one_round.median(dividend), one_round.median(divisor)
    return "?" if above is None or below is None else f"{above / below:.2f}"


def _bandwidth(one_round: RoundResult, label: str) -> str:
    timing = one_round.timing(label)
    if timing is None or timing.median is None:
        return _milliseconds(timing)
    return f"{one_round.size / timing.median / 1e9:.2f}"


def _milliseconds(timing: Timing | None) -> str:
    if timing is None:
        return ""
    if timing.median is None:
        return NOT_INSTALLED if _is_missing(timing) else _FAILED
    return _number(timing.median)


def _is_missing(timing: Timing) -> bool:
    return timing.error is not None and timing.error.startswith(NOT_INSTALLED)


def _range(timing: Timing) -> str:
    if timing.median is None:
        return ""
    return f"{_number(min(timing.seconds))} … {_number(max(timing.seconds))}"


def _number(seconds: float) -> str:
    return f"{seconds * 1000:.3g}" if seconds < 1 else f"{seconds * 1000:.0f}"


def _markdown(rows: Rows) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    padded = [
        [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:]))] for row in rows
    ]
    head, *body = ["| " + " | ".join(row) + " |" for row in padded]
    rule = "|-" + "-" * widths[0] + "-|" + "".join("-" * width + "-:|" for width in widths[1:])
    return "\n".join([head, rule, *body])
