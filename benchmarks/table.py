"""The results as Markdown tables, the ratios first."""

from __future__ import annotations

import textwrap

from benchmarks.cases import ALONE, MIRRORED
from benchmarks.results import CaseResult, Results, RoundResult, Timing

_FAILED = "failed"
_SHORT = {MIRRORED: "MWMS"}
_SMALLEST_BANDWIDTH = 1 << 16
_ERROR_WIDTH = 300


def tables(results: Results) -> str:
    """All cases, and where they were measured."""
    repeats = "1 repetition" if results.repeats == 1 else f"{results.repeats} repetitions"
    head = f"Measured on {results.date}: {results.machine.line()}. Medians of {repeats}."
    return "\n\n".join([head, *(_case_text(case) for case in results.cases)]) + "\n"


def _case_text(case: CaseResult) -> str:
    rows = _sizes(case) if len(case.rounds) > 1 else _rivals(case.rounds[0])
    note = f"×: times as fast as {MIRRORED} (MWMS)."
    text = f"### {case.title}, {case.ranks} ranks\n\n{note}\n\n{_markdown(rows)}"
    errors = [
        f"* {one_round.label}, {timing.rival}: {textwrap.shorten(timing.error, _ERROR_WIDTH)}"
        for one_round in case.rounds
        for timing in one_round.timings
        if timing.error is not None
    ]
    return "\n".join([text, "", *errors]) if errors else text


def _sizes(case: CaseResult) -> list[list[str]]:
    """One row a round."""
    labels = [timing.rival for timing in case.rounds[0].timings]
    others = [label for label in labels if label != MIRRORED]
    rows = [
        [
            "size",
            *(f"{label} ×" for label in others),
            *(f"{_SHORT.get(label, label)}, ms" for label in labels),
            *(f"{_SHORT.get(label, label)}, GB/s" for label in labels),
        ]
    ]
    for one_round in case.rounds:
        medians = [one_round.median(label) for label in labels]
        rows.append(
            [
                one_round.label,
                *(_ratio(one_round, label) for label in others),
                *(_milliseconds(median) for median in medians),
                *(_bandwidth(one_round.size, median) for median in medians),
            ]
        )
    return rows


def _rivals(one_round: RoundResult) -> list[list[str]]:
    """One row a rival."""
    rows = [["rival", "step rate ×", "ms a step", "fastest … slowest", f"ms over {ALONE}"]]
    alone = one_round.median(ALONE)
    for timing in one_round.timings:
        median = timing.median
        over = "" if median is None or alone is None else f"{(median - alone) * 1000:.0f}"
        rows.append([timing.rival, _ratio(one_round, timing.rival), _milliseconds(median), _range(timing), over])
    return rows


def _ratio(one_round: RoundResult, label: str) -> str:
    mine, theirs = one_round.median(label), one_round.median(MIRRORED)
    if mine is None:
        return _FAILED
    return "?" if theirs is None else f"{theirs / mine:.2f}"


def _bandwidth(size: int, seconds: float | None) -> str:
    if size < _SMALLEST_BANDWIDTH:
        return ""  # latency is all there is
    return _FAILED if seconds is None else f"{size / seconds / 1e9:.2f}"


def _milliseconds(seconds: float | None) -> str:
    return _FAILED if seconds is None else f"{seconds * 1000:.3g}" if seconds < 1 else f"{seconds * 1000:.0f}"


def _range(timing: Timing) -> str:
    if timing.median is None:
        return _FAILED
    return f"{_milliseconds(min(timing.seconds))} … {_milliseconds(max(timing.seconds))}"


def _markdown(rows: list[list[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    padded = [
        [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:]))] for row in rows
    ]
    head, *body = ["| " + " | ".join(row) + " |" for row in padded]
    rule = "|-" + "-" * widths[0] + "-|" + "".join("-" * width + "-:|" for width in widths[1:])
    return "\n".join([head, rule, *body])
