"""Runs a case: starts the processes, lets one rival run at a time, in turn, and collects the times."""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.cases import Case, Rival, Round
from benchmarks.process_set import ProcessSet, RivalError
from benchmarks.results import CaseResult, RoundResult, Timing


def run_case(case: Case, ranks: int, repeats: int, logs: Path) -> CaseResult:
    """Measure a case.

    Args:
        case: what.
        ranks: processes of each side.
        repeats: how often each rival is timed.
        logs: directory for the processes' output.

    Returns:
        The times; a rival that failed has its error in their place, and the others go on.
    """
    name = f"{case.name}, {ranks} ranks"
    progress(f"{name}: starting the processes")
    sides = sorted({rival.side for one_round in case.rounds for rival in one_round.rivals})
    sets = {side: ProcessSet(side, ranks, logs / f"{case.name}_{ranks}") for side in sides}
    result = CaseResult(case.name, case.title, ranks, [])
    try:
        for one_round in case.rounds:
            result.rounds.append(_run_round(one_round, sets, repeats, f"{name}, {one_round.label}"))
    finally:
        for processes in sets.values():
            processes.close()
    return result


def progress(text: str) -> None:
    """Say what is going on, where it doesn't mix with the table."""
    print(f"[benchmarks] {text}", file=sys.stderr, flush=True)


def _run_round(one_round: Round, sets: dict[str, ProcessSet], repeats: int, name: str) -> RoundResult:
    timings = {rival: Timing(rival.label) for rival in one_round.rivals}

    def ask(rival: Rival, *message: object) -> list[float]:
        try:
            return sets[rival.side].ask(*message)
        except RivalError as error:
            progress(f"{name}, {rival.label}: {error}")
            timings[rival].error = str(error)
            return []

    for rival in one_round.rivals:
        progress(f"{name}: preparing {rival.label}")
        ask(rival, "prepare", rival.label, rival.method, rival.arguments)
    for repetition in range(repeats):
        progress(f"{name}: repetition {repetition + 1} of {repeats}")
        # Another one begins each time, so that nobody always runs after the same neighbour's leftovers in the caches.
        shift = repetition % len(one_round.rivals)
        for rival in one_round.rivals[shift:] + one_round.rivals[:shift]:
            if timings[rival].error is None:
                seconds = ask(rival, "measure", rival.label, one_round.steps)
                if seconds:
                    timings[rival].seconds.append(max(seconds))
    return RoundResult(one_round.label, one_round.size, one_round.steps, list(timings.values()))
