"""The causes that ``npurun verify`` knows: what has to be seen, most specific first. ``causes.md`` has what to say."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Callable

import numpy as np

from npu_device._src.comparison import compare
from npu_device._src.comparison.compare import (
    GRADIENT,
    STATE,
    UPDATE,
    Deviation,
    Record,
    RecordedCall,
    RecordedStep,
)

PAGE = Path(__file__).with_name("causes.md").read_text(encoding="utf-8")
_SHOWN = 5


class Findings:
    """Everything that is compared for one number of ranks.

    Args:
        one: the single process; what stands for it if the script uses Horovod's names.
        again: the same with inputs that differ in the last bit.
        ranks: the ranks' records. All have the same steps (``compare.aligned``).
    """

    def __init__(self, one: Record, again: Record, ranks: Sequence[Record]) -> None:
        self.one, self.again, self.ranks, self.size = one, again, ranks, len(ranks)
        self.steps: list[tuple[RecordedStep, ...]] = list(
            zip(one.steps, *(record.steps for record in ranks))
        )
        found = [compare.compare(one, again, record) for record in ranks]
        # Of variables that no optimizer trains, those of any rank. Later steps follow from the first one that differs.
        self.deviations = found[0] + [
            each for more in found[1:] for each in more if each.kind == STATE
        ]
        self.begins = min((each.step for each in self.deviations if each.kind != STATE), default=0)
        self.index = max(self.begins, 1) - 1  # of the first step that differs, or of the first step

    def first(self, kind: str = GRADIENT) -> list[Deviation]:
        """Return what differs in the first step in which gradients or updates do."""
        return [each for each in self.deviations if each.step == self.begins and each.kind == kind]

    def ratio(self, kind: str = GRADIENT) -> float:
        """Return the multiple of one process's that all of them are; 0 if they aren't."""
        ratios = np.array([each.ratio or 0 for each in self.first(kind)])
        return (
            float(ratios.mean())
            if len(ratios) and ratios.all() and np.ptp(ratios) < 0.1 * abs(ratios.mean())
            else 0
        )

    def is_ratio(self, wanted: float, kind: str = GRADIENT) -> bool:
        return abs(self.ratio(kind) - wanted) < 0.1 * wanted

    def phase(self) -> str:
        """Return the phase of the first step that differs."""
        return self.one.steps[self.index].phase

    def calls(self) -> list[RecordedCall]:
        """Return the calls of rank 0 that led to the first step that differs.

        They come before a step of its optimizer. Where optimizers take turns, they may come before another's.
        """
        steps = self.ranks[0].steps
        optimizer = steps[self.index].optimizer
        begin = [step.optimizer for step in steps].index(optimizer)
        in_turns = [optimizer, *(step.optimizer for step in steps[begin:])]
        return next(filter(None, map(self.ranks[0].calls_before.get, in_turns)), [])

    def line(self, *kinds: str) -> str:
        """Return the first of these calls that is of one of some kinds, with its line; "" without one."""
        return next((str(call) for call in self.calls() if call.kind in kinds), "")

    def called(self, kind: str) -> str:
        """Return the first call of a kind in the whole script of rank 0, with its line; "" without one."""
        return next(map(str, self.ranks[0].of(kind)), "")

    def other_call(self, kind: str, records: Sequence[Record]) -> str:
        """Return the first call of a kind that hasn't the same outcome in all processes."""
        for calls in zip(*(record.of(kind) for record in records)):
            if any(call.outcome != calls[0].outcome for call in calls):
                return str(calls[0])
        return ""

    def differ(self, name: str, index: int | None) -> bool:
        """Return True if the ranks' gradients, or the trained weights before a step, differ from each other."""
        steps = () if index is None else self.steps[index][1:]
        values = [getattr(step, name)[: step.trained] for step in steps]
        return not all(compare.equal(each, values[0]) for each in values[1:])

    # Each of the following returns what it has found as text, or True; "" or False if it isn't so.

    def other_samples(self) -> dict[int, str]:
        """The ranks together don't read the samples of one process: in which steps, and what they read.

        As many other ones in a step without other gradients are a generator's: the same but for rounding.
        """
        found = {}
        for number, (one, *ranks) in enumerate(self.steps, start=1):
            mine, theirs = one.rows, compare.union(ranks)
            counts = sum(mine.values()), sum(theirs.values())
            if mine != theirs and (number <= self.begins or counts[0] != counts[1]):
                missing, others = sum((mine - theirs).values()), sum((theirs - mine).values())
                found[number] = (
                    f"in step {number}, one process reads {counts[0]} samples, and the ranks together {counts[1]}; "
                    f"{missing} of the first are missing, and {others} are others or repeated"
                )
        return found

    def same_samples(self) -> bool:
        """All ranks read the same samples."""
        first, *others = self.steps[min(self.other_samples(), default=1) - 1][1:]
        return bool(first.rows) and all(step.rows == first.rows for step in others)

    def shuffles_unseeded(self) -> bool:
        """The ranks may really shuffle differently: no seed is set, not in fit either."""
        calls = self.ranks[0].of("shuffle")
        return not self.called("seed") and (
            bool(self.steps[0][1].logs) or any(call.outcome is None for call in calls)
        )

    def different_start(self) -> int | None:
        """Return the place of an optimizer's first step, before which the ranks have different variables."""
        optimizers: set[str] = set()
        for index, step in enumerate(self.one.steps[: self.index + 1]):
            if step.optimizer not in optimizers and self.differ("weights", index):
                return index
            optimizers.add(step.optimizer)
        return None

    def not_broadcast(self) -> str:
        """The ranks have different variables when an optimizer makes its first step, rank 0 those of one process."""
        index = self.different_start()
        if index is None or self.moved(index):
            return ""
        return self.one.steps[index].phase

    def set_in_the_step(self) -> str:
        """No rank has the variables of one process when an optimizer makes its first step."""
        index = self.different_start()
        return "" if index is None else self.moved(index)

    def moved(self, index: int) -> str:
        """Return the trained variables that rank 0 has with other values than one process before a step."""
        one, main, *_ = self.steps[index]
        weights = zip(one.names[: one.trained], one.weights, main.weights)
        return ", ".join(
            [name for name, alone, of_main in weights if not compare.equal(alone, of_main)][:_SHOWN]
        )

    def not_reduced(self) -> str:
        """The ranks apply different gradients in the first step that differs."""
        return self.phase() if self.differ("gradients", self.index) else ""

    def updates_apart(self) -> str:
        """The ranks apply the same gradients, and have different variables before or after that."""
        apart = self.differ("weights", self.index) or self.differ(
            "weights", self.one.successor(self.index)
        )
        return self.phase() if apart else ""

    def discarded(self) -> str:
        """As many tensors are reduced as the optimizer trains variables."""
        trained = self.steps[self.index][1].trained
        reduced = [
            call for call in self.calls() if call.kind == "all_reduce" and call.outcome == trained
        ]
        return next(map(str, reduced), "")

    def only_scalars(self) -> str:
        """Nothing but single numbers is reduced."""
        reduced = [call for call in self.calls() if call.kind == "all_reduce"]
        return self.line("all_reduce") if all(call.outcome <= 1 for call in reduced) else ""

    def clipped(self) -> str:
        """Gradients are clipped before anything is reduced, even if nothing was above the limit."""
        first = self.line("all_reduce", "clip")
        return first if first and first == self.line("clip") else ""

    def state(self) -> str:
        """Variables that no optimizer trains differ when gradients begin to.

        A difference alone says nothing: a step may add up the ranks' parts at its end.
        """
        names = [
            each.variable
            for each in self.deviations
            if each.kind == STATE and each.step <= self.begins
        ]
        return ", ".join(list(dict.fromkeys(names))[:_SHOWN])

    def variables(self, kind: str = GRADIENT) -> str:
        """Gradients, or updates, differ: of which variables, and how."""
        found = [
            f"{each.variable} {'points elsewhere' if each.ratio is None else f'is {each.ratio:.3f} of it'} "
            f"(off by {each.off:.0e}, rounding {each.allowed:.0e})"
            for each in self.first(kind)
        ]
        return ", ".join(
            found[:_SHOWN] + [f"and {len(found) - _SHOWN} more"] * (len(found) > _SHOWN)
        )

    def other_logs(self, metrics: bool) -> str:
        """The ranks agree on a number in the logs, which isn't one process's: of the model's metrics, or of others."""
        for number, (again, mine, *ranks) in enumerate(
            zip(self.again.steps, *zip(*self.steps)), start=1
        ):
            for name, value in mine.logs.items():
                found = [step.logs.get(name, np.nan) for step in ranks]
                allowed = 30 * abs(again.logs.get(name, value) - value) + 1e-4 * abs(value) + 1e-6
                is_metric = name in self.one.metrics
                if is_metric == metrics and np.ptp(found) <= allowed < abs(found[0] - value):
                    return f"{name} of step {number} is {found[0]:.6g} instead of {value:.6g}"
        return ""


TEXTS = dict(re.findall(r"^### (.+?)\n\n(.+?)(?=\n### |\Z)", PAGE, flags=re.M | re.S))
"""The sections of ``causes.md``: what a cause means, with an example, and what to do."""

RANDOM, NO_CALL = "random numbers", "no call"
_CAUSES: tuple[tuple[str, Callable[[Findings], object]], ...] = (
    (NO_CALL, lambda found: not all(record.joined for record in found.ranks)),
    ("adapted to a part", lambda found: found.other_call("adapted", [found.one, *found.ranks])),
    ("seed of each rank's own", lambda found: found.called("unseeded")),
    (
        "seed of each rank's own",
        lambda found: found.other_samples() and found.other_call("shuffle", found.ranks),
    ),
    ("different starts", Findings.not_broadcast),
    ("state in the step", Findings.set_in_the_step),
    ("discarded result", lambda found: found.not_reduced() and found.discarded()),
    ("only the loss is reduced", lambda found: found.not_reduced() and found.only_scalars()),
    ("not reduced", Findings.not_reduced),
    ("updates of each rank's own", Findings.updates_apart),
    ("same samples", lambda found: found.other_samples() and found.same_samples()),
    (RANDOM, lambda found: found.other_samples() and found.line("random")),
    ("other samples", lambda found: next(iter(found.other_samples().values()), "")),
    ("normalized alone", lambda found: found.first() and found.line("normalizes alone")),
    (
        "clipped before the reduction",
        lambda found: found.first() and not found.ratio() and found.clipped(),
    ),
    (
        "add_loss per sample",
        lambda found: found.is_ratio(1 / found.size) and found.line("add_loss"),
    ),
    (
        "global batch size",
        lambda found: found.is_ratio(1 / found.size) and found.line("compute_average_loss"),
    ),
    ("sum averaged", lambda found: found.is_ratio(1 / found.size)),
    (
        "mean summed",
        lambda found: (
            found.is_ratio(found.size) and (found.line("all_reduce") or "by an optimizer")
        ),
    ),
    ("state in the step", Findings.state),
    ("scaled rate", lambda found: not found.first() and found.is_ratio(found.size, UPDATE)),
    ("updates by the number of ranks", lambda found: not found.first() and found.ratio(UPDATE)),
    ("other updates", lambda found: not found.first() and found.variables(UPDATE)),
    (RANDOM, lambda found: found.first() and found.line("random")),
    ("unknown", Findings.variables),
    ("metric of sums", lambda found: found.other_logs(metrics=True)),
    ("other logs", lambda found: found.other_logs(metrics=False)),
)
"""Most specific first."""
_OF_HOROVOD: tuple[tuple[str, Callable[[Findings], object]], ...] = (
    ("Horovod: not reduced", lambda found: found.not_reduced() and found.first()),
    (
        "Horovod: different variables",
        lambda found: found.differ("weights", 1),
    ),  # which may be sent after a first step
    ("Horovod: not the average", Findings.variables),
)


def cause_of(found: Findings) -> tuple[str, str]:
    """Return name and text of the most specific cause; both "" if N ranks give the single-process result."""
    for name, seen in _OF_HOROVOD if found.one.horovod else _CAUSES:
        where = seen(found)
        if where:
            text = re.sub(r"```python.+?```\n\n|`", "", TEXTS[name].strip(), flags=re.S)
            text = "\n".join(" ".join(part.split()) for part in text.split("\n\n"))
            ratio = found.ratio() or found.ratio(UPDATE)
            return name, text.format(
                ranks=found.size, ratio=f"{ratio:.2f}", step=found.begins, where=where
            )
    return "", ""
