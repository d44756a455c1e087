"""The causes that ``npurun verify`` knows: what has to be seen, most specific first. ``causes.md`` has what to say."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Callable

import numpy as np

from npu_device._src.verify import compare
from npu_device._src.verify.compare import GRADIENT, STATE, UPDATE, Deviation, Record, Step

PAGE = Path(__file__).with_name("causes.md").read_text(encoding="utf-8")
_SHOWN = 5


class Findings:
    """Everything that is compared for one number of ranks.

    Args:
        one: the single process; what stands for it if the script uses Horovod's names.
        again: the same with inputs that differ in the last bit.
        ranks: the ranks' records.
    """

    def __init__(self, one: Record, again: Record, ranks: Sequence[Record]) -> None:
        self.one, self.again, self.ranks, self.size = one, again, ranks, len(ranks)
        self.steps: list[tuple[Step, ...]] = list(zip(one.steps, *(record.steps for record in ranks)))
        found = [compare.compare(one, again, record) for record in ranks]
        # Of variables that no optimizer trains, those of any rank. Later steps follow from the first one that differs.
        self.deviations = found[0] + [each for more in found[1:] for each in more if each.kind == STATE]
        self.begins = min((each.step for each in self.deviations if each.kind != STATE), default=0)

    def first(self, kind: str = GRADIENT) -> list[Deviation]:
        """Return what differs in the first step in which gradients or updates do."""
        return [each for each in self.deviations if each.step == self.begins and each.kind == kind]

    def ratio(self) -> float:
        """Return the multiple of one process's that all deviating gradients of that step are; 0 if they aren't."""
        ratios = np.array([each.ratio or 0 for each in self.first()])
        return float(ratios.mean()) if len(ratios) and ratios.all() and np.ptp(ratios) < 0.1 * abs(ratios.mean()) else 0

    def is_ratio(self, wanted: float) -> bool:
        """Return True if all deviating gradients are this multiple."""
        return abs(self.ratio() - wanted) < 0.1 * wanted

    def line(self, kind: str) -> str:
        """Return the first line in which a rank makes a call of this kind; "" without one."""
        return next((str(call["line"]) for call in self.ranks[0].of(kind)), "")

    def differ(self, name: str, number: int) -> bool:
        """Return True if the ranks' gradients, or the trained weights before a step, differ from each other."""
        steps = self.steps[number][1:] if number < len(self.steps) else ()
        values = [getattr(step, name)[: step.trained] for step in steps]
        return not all(compare.equal(each, values[0]) for each in values[1:])

    # Each of the following returns what it has found as text, or True; "" or False if it isn't so.

    def adapted(self) -> str:
        """A layer has adapted to something else than the single process's."""
        for number, mine in enumerate(self.one.of("adapted")):
            calls = [record.of("adapted")[number : number + 1] for record in self.ranks]
            if any(call and call[0]["state"] != mine["state"] for call in calls):
                return f"{mine['layer']!r}, {mine['line']}"
        return ""

    def other_seed(self) -> str:
        """A shuffle before the division has no seed, or another one on each rank."""
        for call in self.ranks[0].of("unseeded"):
            return f"without a seed in {call['line']}"
        if not self.other_samples():
            return ""
        by_rank = [{call["number"]: call for call in record.of("shuffle")} for record in self.ranks]
        for number, call in by_rank[0].items():
            if any(other.get(number, call)["seed"] != call["seed"] for other in by_rank[1:]):
                return str(call["line"])
        return ""

    def drawn(self) -> str:
        """A step draws random numbers by itself."""
        return next((f"{call['what']}, {call['line']}" for call in self.one.of("random")), "")

    def same_samples(self) -> bool:
        """All ranks read the same samples."""
        first = self.steps[0][1]
        return bool(first.rows) and all(step.rows == first.rows for step in self.steps[0][2:])

    def shuffles_unseeded(self) -> bool:
        """Return True if the ranks may really shuffle differently: no seed is set, not in fit either."""
        calls, first = self.ranks[0].of("shuffle"), self.ranks[0].steps[0]
        return not self.ranks[0].of("seed") and (bool(first.logs) or any(call["seed"] is None for call in calls))

    def has_other_samples(self, number: int) -> bool:
        """Return True if the ranks together don't read the samples of one process in a step.

        As many other ones in a step without other gradients are a generator's: the same but for rounding.
        """
        mine, theirs = self.steps[number - 1][0].rows, compare.union(self.steps[number - 1][1:])
        return theirs != mine and (number <= self.begins or sum(mine.values()) != sum(theirs.values()))

    def other_samples(self) -> str:
        """The ranks together don't read the samples of one process."""
        for number, (mine, *ranks) in enumerate(self.steps, start=1):
            if self.has_other_samples(number):
                theirs = compare.union(ranks)
                counts = sum(mine.rows.values()), sum(theirs.values())
                missing, others = sum((mine.rows - theirs).values()), sum((theirs - mine.rows).values())
                return (
                    f"in step {number}, one process reads {counts[0]} samples, and the ranks together {counts[1]}; "
                    f"{missing} of the first are missing, and {others} are others or repeated"
                )
        return ""

    def not_reduced(self) -> bool:
        """The ranks apply different gradients in the first step, or have other weights after it."""
        return self.differ("gradients", 0) or self.differ("weights", 1)

    def thrown_away(self) -> str:
        """An all_reduce was given just the gradients that each rank then applies."""
        first = self.steps[0][1]
        given = [line for line, values in first.reduced if len(values) and compare.equal(values, first.gradients)]
        return given[0] if given and self.not_reduced() else ""

    def only_scalars(self) -> str:
        """Nothing but single numbers is reduced."""
        is_so = all(call["values"] <= 1 for call in self.ranks[0].of("all_reduce")) and self.not_reduced()
        return self.line("all_reduce") if is_so else ""

    def clipped(self) -> str:
        """Each rank clips gradients, which then point elsewhere."""
        is_so = bool(self.first()) and not self.ratio() and not self.not_reduced()
        return (self.line("clip_by_global_norm") or self.line("clip_by_norm")) if is_so else ""

    def clipped_first(self) -> str:
        """Gradients are clipped before anything is reduced, even if nothing was above the limit."""
        kinds = [call["kind"] for call in self.ranks[0].calls if call["kind"].startswith(("all_reduce", "clip_by"))]
        return self.line(kinds[0]) if kinds and kinds[0] != "all_reduce" else ""

    def state(self) -> str:
        """Variables that no optimizer trains differ when gradients begin to.

        A difference alone says nothing: a step may add up the ranks' parts at its end.
        """
        names = [each.variable for each in self.deviations if each.kind == STATE and each.step <= self.begins]
        return ", ".join(list(dict.fromkeys(names))[:_SHOWN])

    def only_updates(self) -> bool:
        """Gradients are right, and updates aren't."""
        return bool(self.first(UPDATE)) and not self.first()

    def scaled(self) -> bool:
        """The updates are as many times as large as there are ranks."""
        ratios = [each.ratio or 0 for each in self.first(UPDATE)]
        return self.only_updates() and all(abs(ratio / self.size - 1) < 0.1 for ratio in ratios)

    def variables(self) -> str:
        """The gradients that differ first."""
        found = [
            f"{each.variable} {'points elsewhere' if each.ratio is None else f'is {each.ratio:.3f} of it'} "
            f"(off by {each.off:.0e}, rounding {each.allowed:.0e})"
            for each in self.first()
        ]
        return ", ".join(found[:_SHOWN] + [f"and {len(found) - _SHOWN} more"] * (len(found) > _SHOWN))

    def other_logs(self) -> str:
        """The ranks agree on a loss or metric, which isn't one process's."""
        for number, (again, mine, *ranks) in enumerate(zip(self.again.steps, *zip(*self.steps)), start=1):
            for name, value in mine.logs.items():
                found = [step.logs.get(name, np.nan) for step in ranks]
                allowed = 30 * abs(again.logs.get(name, value) - value) + 1e-4 * abs(value) + 1e-6
                if np.ptp(found) <= allowed < abs(found[0] - value):
                    return f"{name} of step {number} is {found[0]:.6g} instead of {value:.6g}"
        return ""


TEXTS = dict(re.findall(r"^### (.+?)\n\n(.+?)(?=\n### |\Z)", PAGE, flags=re.M | re.S))
"""The sections of ``causes.md``: what a cause means, with an example, and what to do."""

RANDOM, NO_CALL = "random numbers", "no call"
_CAUSES: tuple[tuple[str, Callable[[Findings], str | bool]], ...] = (
    (NO_CALL, lambda found: not all(record.joined for record in found.ranks)),
    ("adapted to a part", Findings.adapted),
    ("seed of each rank's own", Findings.other_seed),
    ("different starts", lambda found: found.differ("weights", 0)),
    ("discarded result", Findings.thrown_away),
    ("only the loss is reduced", Findings.only_scalars),
    ("not reduced", Findings.not_reduced),
    ("same samples", lambda found: found.other_samples() and found.same_samples()),
    (RANDOM, lambda found: found.other_samples() and found.drawn()),
    ("other samples", Findings.other_samples),
    ("clipped before the reduction", Findings.clipped),
    ("add_loss per sample", lambda found: found.is_ratio(1 / found.size) and found.line("add_loss")),
    ("global batch size", lambda found: found.is_ratio(1 / found.size) and found.line("compute_average_loss")),
    ("sum averaged", lambda found: found.is_ratio(1 / found.size)),
    ("mean summed", lambda found: found.is_ratio(found.size) and (found.line("all_reduce") or "by an optimizer")),
    ("state in the step", Findings.state),
    ("scaled rate", Findings.scaled),
    ("other updates", Findings.only_updates),
    (RANDOM, lambda found: bool(found.first()) and found.drawn()),
    ("unknown", Findings.variables),
    ("other logs", Findings.other_logs),
)
_OF_HOROVOD: tuple[tuple[str, Callable[[Findings], str | bool]], ...] = (
    ("Horovod: not reduced", lambda found: found.not_reduced() and bool(found.first())),
    ("Horovod: different variables", lambda found: found.differ("weights", 1)),  # which may be sent after a first step
    ("Horovod: not the average", Findings.variables),
)
"""Most specific first."""


def cause_of(found: Findings) -> tuple[str, str]:
    """Return name and text of the most specific cause; both "" if N ranks give the single-process result."""
    for name, seen in _OF_HOROVOD if found.one.horovod else _CAUSES:
        where = seen(found)
        if where:
            text = re.sub(r"```python.+?```\n\n|`", "", TEXTS[name].strip(), flags=re.S)
            text = "\n".join(" ".join(part.split()) for part in text.split("\n\n"))
            return name, text.format(ranks=found.size, ratio=f"{found.ratio():.2f}", step=found.begins, where=where)
    return "", ""
