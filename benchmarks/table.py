"""The results as Markdown tables, the ratios first."""

from __future__ import annotations

from benchmarks.cases import ALONE, MIRRORED
from benchmarks.results import CaseResult, Results, RoundResult, Timing

_FAILED = "failed"


def tables(results: Results) -> str:
    """All cases, and where they were measured."""
    repeats = "1 repetition" if results.repeats == 1 else f"{results.repeats} repetitions"
    head = f"Measured on {results.date}: {results.machine.line()}. Medians of {repeats}."
    return "\n\n".join([head, *(_case_text(case) for case in results.cases)]) + "\n"


def _case_text(case: CaseResult) -> str:
    rows = _sizes(case) if len(case.rounds) > 1 else _rivals(case.rounds[0])
    text = f"### {case.title}, {case.ranks} ranks\n\n{_markdown(rows)}"
    errors = [
        f"* {one_round.label}, {timing.rival}: {timing.error.splitlines()[0]}"
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
            *(f"{label}: times as fast as {MIRRORED}" for label in others),
            *(f"{label}, ms" for label in labels),
            *(f"{label}, GB/s" for label in labels),
        ]
    ]
    for one_round in case.rounds:
        medians = [one_round.median(label) for label in labels]
        rows.append(
            [
                one_round.label,
                *(_ratio(one_round, label) for label in others),
                *(_milliseconds(median) for median in medians),
                *(_FAILED if median is None else f"{one_round.size / median / 1e9:.3g}" for median in medians),
            ]
        )
    return rows


def _rivals(one_round: RoundResult) -> list[list[str]]:
    """One row a rival."""
    rows = [
        ["rival", f"step rate against {MIRRORED}", "ms a step", "fastest … slowest", "on top of no communication, ms"]
    ]
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


def _milliseconds(seconds: float | None) -> str:
    return _FAILED if seconds is None else f"{seconds * 1000:.3g}" if seconds < 1 else f"{seconds * 1000:.0f}"


def _range(timing: Timing) -> str:
    if timing.median is None:
        return _FAILED
    return f"{_milliseconds(min(timing.seconds))} … {_milliseconds(max(timing.seconds))}"


def _markdown(rows: list[list[str]]) -> str:
    head, *body = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([head, "|---" + "|--:" * (len(rows[0]) - 1) + "|", *body])
