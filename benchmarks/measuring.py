"""Runs a case: starts the processes, lets one rival run at a time, in turn, and collects the times."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from benchmarks.cases import Case, Rival, Round
from benchmarks.process_set import ProcessSet, RivalError
from benchmarks.results import NOT_INSTALLED, CaseResult, RoundResult, Timing
from benchmarks.sides import SIDES
from npu_device._src.testing import hosts


def run_case(case: Case, ranks: int, repeats: int, logs: Path) -> CaseResult:
    """Measure a case.

    Args:
        case: the case.
        ranks: processes of each side.
        repeats: how often each rival is timed.
        logs: directory for the processes' output.

    Returns:
        The times; a rival that failed or isn't installed has its error in their place, and the others go on.
    """
    name = f"{case.name}, {ranks} ranks"
    result = CaseResult(case.name, case.title, ranks, [])
    timings = {
        (one_round, rival): Timing(rival.label, error=_missing(rival))
        for one_round in case.rounds
        for rival in one_round.rivals
    }
    present = list(
        dict.fromkeys(rival.side for (_, rival), timing in timings.items() if timing.error is None)
    )
    for together in [[side] for side in present] if case.one_side_at_a_time else [present]:
        progress(f"{name}: starting the processes ({', '.join(together)})")
        sets = {side: ProcessSet(side, ranks, logs / f"{case.name}_{ranks}") for side in together}
        prepared: dict[tuple[str, str], Rival] = {}
        try:
            for one_round in case.rounds:
                here = {
                    rival: timings[one_round, rival]
                    for rival in one_round.rivals
                    if rival.side in sets
                }
                for host in range(
                    ranks if one_round.gbit is not None and hosts.can_be_made() else 0
                ):
                    hosts.set_speed(host, one_round.gbit or 0.0)
                _run_round(one_round, here, sets, prepared, repeats, f"{name}, {one_round.label}")
        finally:
            for processes in sets.values():
                processes.close()
    for one_round in case.rounds:
        in_order = [timings[one_round, rival] for rival in one_round.rivals]
        result.rounds.append(
            RoundResult(one_round.label, one_round.size, one_round.steps, in_order, one_round.gbit)
        )
    return result


def progress(text: str) -> None:
    """Report progress to stderr, where it doesn't mix with the table."""
    print(f"[benchmarks] {text}", file=sys.stderr, flush=True)


def _missing(rival: Rival) -> str | None:
    missing = SIDES[rival.side].missing()
    return (
        f'{NOT_INSTALLED}: {", ".join(missing)}; pip install -e ".[rivals]" brings it'
        if missing
        else None
    )


def _run_round(
    one_round: Round,
    timings: dict[Rival, Timing],
    sets: dict[str, ProcessSet],
    prepared: dict[tuple[str, str], Rival],
    repeats: int,
    name: str,
) -> None:
    """Time a round's rivals; steps that an earlier round has made are ``prepared``, by side and label."""

    def ask(rival: Rival, *message: object) -> list[Any]:
        try:
            return sets[rival.side].ask(*message)
        except RivalError as error:
            progress(f"{name}, {rival.label}: {error}")
            timings[rival].error = str(error)
            return []

    rivals = list(timings)
    for rival in rivals:
        if prepared.get((rival.side, rival.label)) != rival:
            progress(f"{name}: preparing {rival.label}")
            if ask(rival, "prepare", rival.label, rival.method, rival.arguments):
                prepared[rival.side, rival.label] = rival
    for repetition in range(repeats * one_round.turns):
        progress(f"{name}: repetition {repetition + 1} of {repeats * one_round.turns}")
        # A different rival begins each time, so that none always runs after the same neighbour's leftovers in the
        # caches.
        shift = repetition % max(1, len(rivals))
        for rival in rivals[shift:] + rivals[:shift]:
            if timings[rival].error is None:
                measured = ask(rival, "measure", rival.label, one_round.steps)
                if measured:
                    seconds, core_seconds = zip(*measured)
                    timings[rival].seconds.append(max(seconds))
                    timings[rival].core_seconds.append(sum(core_seconds) / len(core_seconds))
