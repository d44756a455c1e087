"""Runs a case: starts the processes, lets one rival run at a time, in turn, and collects the times."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import cores
from benchmarks.cases import Case, Rival, Round
from benchmarks.cores import APART, SHARED, UNKNOWN
from benchmarks.process_set import ProcessSet, RivalError
from benchmarks.results import NOT_INSTALLED, CaseResult, RoundResult, Timing
from benchmarks.sides import SIDES
from npu_device._src.testing import hosts

_LOOK_SECONDS = 1.0  # between two looks at the cores while waiting for a state


@dataclass(frozen=True)
class Patience:
    """How often each rival is timed in each state of the cores, and when to give up waiting for a state."""

    repeats: int
    until: float  # by ``time.monotonic``


class CaseTimings:
    """The timings of a case, by state of the cores: a timing counts if the state was the same before and after it."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self._timings: dict[tuple[str, Round, Rival], Timing] = {}
        self._distances: dict[str, list[float]] = {}
        self.errors: dict[tuple[Round, Rival], str] = {}
        for one_round in case.rounds:
            for rival in one_round.rivals:
                error = _missing(rival)
                if error is not None:
                    self.errors[one_round, rival] = error
        self.distance = cores.measure()
        self.states = (UNKNOWN,) if self.distance.state == UNKNOWN else (SHARED, APART)

    def look(self) -> None:
        """Measure the distance of the cores."""
        self.distance = cores.measure()
        if self.distance.nanoseconds is not None:
            self._distances.setdefault(self.distance.state, []).append(self.distance.nanoseconds)

    def of(self, state: str, one_round: Round, rival: Rival) -> Timing:
        """Return a rival's timing in a state."""
        key = state, one_round, rival
        return self._timings.setdefault(key, Timing(rival.label))

    def add(self, one_round: Round, rival: Rival, measured: Sequence[tuple[float, float]]) -> None:
        """Add what the ranks measured since the last look at the cores, and look again."""
        before = self.distance.state
        self.look()
        if self.distance.state == before:
            seconds, core_seconds = zip(*measured)
            timing = self.of(before, one_round, rival)
            timing.seconds.append(max(seconds))
            timing.core_seconds.append(sum(core_seconds) / len(core_seconds))

    def lacking(self, one_round: Round, rivals: Iterable[Rival], count: int) -> list[str]:
        """Return the states in which some rival that works has been timed less than ``count`` times."""
        working = [rival for rival in rivals if (one_round, rival) not in self.errors]
        return [
            state
            for state in self.states
            if any(len(self.of(state, one_round, rival).seconds) < count for rival in working)
        ]

    def results(self, ranks: int) -> list[CaseResult]:
        """Return the result for each state."""
        results = []
        for state in self.states:
            rounds = []
            for one_round in self._case.rounds:
                timings = []
                for rival in one_round.rivals:
                    timing = self.of(state, one_round, rival)
                    timing.error = self.errors.get((one_round, rival))
                    timings.append(timing)
                rounds.append(
                    RoundResult(
                        one_round.label, one_round.size, one_round.steps, timings, one_round.gbit
                    )
                )
            distances = self._distances.get(state)
            nanoseconds = statistics.median(distances) if distances else None
            case = self._case
            results.append(CaseResult(case.name, case.title, ranks, rounds, state, nanoseconds))
        return results


def run_case(case: Case, ranks: int, patience: Patience, logs: Path) -> list[CaseResult]:
    """Measure a case.

    Args:
        case: the case.
        ranks: processes of each side.
        patience: how often each rival is timed, and how long to wait for a state of the cores.
        logs: directory for the processes' output.

    Returns:
        The times in each state of the cores; a rival that failed or isn't installed has its error in their place, and
        the others go on.
    """
    name = f"{case.name}, {ranks} ranks"
    timings = CaseTimings(case)
    pairs = [(one_round, rival) for one_round in case.rounds for rival in one_round.rivals]
    working = [rival for pair in pairs if pair not in timings.errors for rival in pair[1:]]
    present = list(dict.fromkeys(rival.side for rival in working))
    for together in [[side] for side in present] if case.one_side_at_a_time else [present]:
        progress(f"{name}: starting the processes ({', '.join(together)})")
        sets = {side: ProcessSet(side, ranks, logs / f"{case.name}_{ranks}") for side in together}
        prepared: dict[tuple[str, str], Rival] = {}
        try:
            for one_round in case.rounds:
                rivals = [rival for rival in one_round.rivals if rival.side in sets]
                for host in range(
                    ranks if one_round.gbit is not None and hosts.can_be_made() else 0
                ):
                    hosts.set_speed(host, one_round.gbit or 0.0)
                turns = _Turns(one_round, rivals, sets, timings, f"{name}, {one_round.label}")
                turns.prepare(prepared)
                turns.run(patience)
        finally:
            for processes in sets.values():
                processes.close()
    return timings.results(ranks)


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


class _Turns:
    """The rivals of a round, each of which is timed in its turn."""

    def __init__(
        self,
        one_round: Round,
        rivals: Sequence[Rival],
        sets: dict[str, ProcessSet],
        timings: CaseTimings,
        name: str,
    ) -> None:
        self._round = one_round
        self._rivals = rivals
        self._sets = sets
        self._timings = timings
        self._name = name

    def prepare(self, prepared: dict[tuple[str, str], Rival]) -> None:
        """Make the rivals' steps, except those that an earlier round has made: ``prepared``, by side and label."""
        for rival in self._rivals:
            if prepared.get((rival.side, rival.label)) != rival:
                progress(f"{self._name}: preparing {rival.label}")
                if self._ask(rival, "prepare", rival.label, rival.method, rival.arguments):
                    prepared[rival.side, rival.label] = rival

    def run(self, patience: Patience) -> None:
        """Time each rival several times in each state of the cores, as far as patience reaches."""
        count = patience.repeats * self._round.turns
        repetition = 0
        self._timings.look()
        while lacking := self._timings.lacking(self._round, self._rivals, count):
            if repetition >= count:
                if time.monotonic() > patience.until:
                    progress(f"{self._name}: {', '.join(lacking)}: not measured often enough")
                    return
                if self._timings.distance.state not in lacking:
                    time.sleep(_LOOK_SECONDS)
                    self._timings.look()
                    continue
            repetition += 1
            state = self._timings.distance.state
            progress(f"{self._name}: repetition {repetition}, {count} in each state ({state})")
            self._time_each(repetition)

    def _time_each(self, repetition: int) -> None:
        # A different rival begins each time, so that none always runs after the same neighbour's leftovers in the
        # caches.
        shift = repetition % max(1, len(self._rivals))
        for rival in [*self._rivals[shift:], *self._rivals[:shift]]:
            if (self._round, rival) not in self._timings.errors:
                measured = self._ask(rival, "measure", rival.label, self._round.steps)
                if measured:
                    self._timings.add(self._round, rival, measured)

    def _ask(self, rival: Rival, *message: object) -> list[Any]:
        if (self._round, rival) in self._timings.errors:
            return []
        try:
            return self._sets[rival.side].ask(*message)
        except RivalError as error:
            progress(f"{self._name}, {rival.label}: {error}")
            self._timings.errors[self._round, rival] = str(error)
            return []
