"""The causes that ``npurun verify`` knows, most specific first: what has to be seen, and what to say of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Callable

import numpy as np

from npu_device._src.verify.compare import Deviation, Record, Step, between, equal, union

_SHOWN = 5


@dataclass
class Findings:
    """Everything that is compared for one number of ranks.

    Attributes:
        one: the single process.
        again: the same with inputs that differ in the last bit.
        ranks: the ranks' records.
        steps: those that all processes have made; the single process's first.
        gradients, updates: what differs on rank 0.
        states: which variables that no optimizer trains differ, on any rank.
    """

    one: Record
    again: Record
    ranks: Sequence[Record]
    steps: Sequence[tuple[Step, ...]] = ()
    gradients: list[Deviation] = field(default_factory=list)
    updates: list[Deviation] = field(default_factory=list)
    states: list[Deviation] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.steps = list(zip(self.one.steps, *(record.steps for record in self.ranks)))
        found = [between(self.one, self.again, rank) for rank in self.ranks]
        self.gradients, self.updates, _ = found[0]
        self.states = [each for _, _, states in found for each in states]
        if all(np.isnan(step.gradients).all() for step in self.one.steps):  # sessions: updates stand for them
            self.gradients = self.updates

    @property
    def size(self) -> int:
        """Return the number of ranks."""
        return len(self.ranks)

    def begins(self) -> int:
        """Return the first step in which something differs; later ones follow from it. 0 if nothing does."""
        return min((each.step for each in (*self.gradients, *self.updates)), default=0)

    def first_of(self, found: Sequence[Deviation]) -> list[Deviation]:
        """Return what differs in the first step in which something does."""
        return [each for each in found if each.step == self.begins()]

    def ratio(self) -> float | None:
        """Return the multiple of one process's that all deviating gradients of that step are."""
        ratios = [each.ratio for each in self.first_of(self.gradients)]
        if not ratios or any(ratio is None for ratio in ratios):
            return None
        values = np.array(ratios, float)
        return float(values.mean()) if np.ptp(values) < 0.1 * abs(values.mean()) else None

    def is_ratio(self, wanted: float) -> bool:
        """Return True if all deviating gradients are this multiple."""
        ratio = self.ratio()
        return ratio is not None and abs(ratio - wanted) < 0.1 * wanted

    def ranks_differ(self) -> bool:
        """Return True if the ranks apply different gradients in the first step, or have other weights after it."""
        return not _same_on_ranks(self.steps[0], "gradients") or any(
            not _same_on_ranks(step, "weights", len(step[0].gradients)) for step in self.steps[1:2]
        )

    def starts_differ(self) -> bool:
        """Return True if the ranks have different weights before the first step."""
        started = [record.calls("started") for record in self.ranks]  # of sessions
        values = [np.array([call["values"] for call in calls]) for calls in started]
        trained = len(self.steps[0][1].gradients)
        sessions_differ = any(not equal(each, values[0]) for each in values)
        return sessions_differ or not _same_on_ranks(self.steps[0], "weights", trained)

    def samples(self) -> str:
        """Return what is wrong with the samples, "" if nothing is.

        As many other ones in a step without other gradients are a generator's: the same but for rounding.
        """
        lines = []
        for number, (mine, *ranks) in enumerate(self.steps, start=1):
            theirs = union(ranks)
            counts = sum(mine.rows.values()), sum(theirs.values())
            if theirs != mine.rows and (number <= self.begins() or counts[0] != counts[1]):
                lines.append(
                    f"step {number}: one process reads {counts[0]} samples, the ranks together "
                    f"{counts[1]}; {sum((mine.rows - theirs).values())} of the process's are not among "
                    f"them, and {sum((theirs - mine.rows).values())} are others or repeated"
                )
        return "\n".join(lines[:_SHOWN])

    def other_logs(self) -> str:
        """Return a loss or metric that the ranks agree on, and that isn't one process's; "" without one."""
        for number, (mine, again, *ranks) in enumerate(
            zip(self.one.steps, self.again.steps, *(record.steps for record in self.ranks)), start=1
        ):
            for name, value in mine.logs.items():
                found = [step.logs.get(name, np.nan) for step in ranks]
                allowed = 30 * abs(again.logs.get(name, value) - value) + 1e-4 * abs(value) + 1e-6
                if np.ptp(found) <= allowed < abs(found[0] - value):
                    return f"{name} of step {number} is {found[0]:.6g} instead of {value:.6g}"
        return ""


def _same_on_ranks(steps: Sequence[Step], name: str, count: int | None = None) -> bool:
    values = [getattr(step, name)[:count] for step in steps[1:]]
    return all(equal(each, values[0]) for each in values[1:])


@dataclass(frozen=True)
class Cause:
    """A cause: its name, when it is one, and what it means.

    Attributes:
        name: for the table of docs/verify.md.
        applies: looks at the findings.
        text: what it means and what to do, with ``{size}`` ranks, the gradients' ``{ratio}`` and the ``{line}``.
        line: finds the line of the script, or what else belongs into the text.
    """

    name: str
    applies: Callable[[Findings], Any]
    text: str
    line: Callable[[Findings], str] = lambda _: ""

    def said(self, found: Findings) -> str:
        """Return the text."""
        ratio = found.ratio()
        return self.text.format(size=found.size, ratio=f"{ratio:.2f}" if ratio else "", line=self.line(found))


def _adapted(found: Findings) -> str:
    """Return a layer that has adapted to something else than the single process's, with its line; "" without one."""
    for number, mine in enumerate(found.one.calls("adapted")):
        calls = [record.calls("adapted")[number : number + 1] for record in found.ranks]
        if any(call and not np.allclose(call[0]["state"], mine["state"], rtol=1e-3) for call in calls):
            return f"{mine['layer']!r}, {mine['line']}"
    return ""


def _other_seed(found: Findings) -> str:
    """Return the line of a shuffle whose seed differs between ranks; "" without one."""
    by_rank = [{call["number"]: call for call in record.calls("shuffle")} for record in found.ranks]
    for number, call in by_rank[0].items():
        if any(other.get(number, call)["seed"] != call["seed"] for other in by_rank[1:]):
            return str(call["line"])
    return ""


def _same_everywhere(found: Findings) -> bool:
    return bool(found.steps[0][1].rows) and all(step.rows == found.steps[0][1].rows for step in found.steps[0][2:])


def _thrown_away(found: Findings) -> str:
    """Return the line whose all_reduce was given just the gradients that each rank then applies; "" without one."""
    first = found.steps[0][1]
    given = [line for line, values in first.reduced if len(values) and equal(values, first.gradients)]
    return given[0] if found.ranks_differ() and given else ""


def _only_scalars(found: Findings) -> bool:
    calls = found.ranks[0].calls("all_reduce")
    return found.ranks_differ() and bool(calls) and all(call["values"] <= 1 for call in calls)


def _clipped(found: Findings) -> str:
    return _line("clip_by_global_norm")(found) or _line("clip_by_norm")(found)


def _state(found: Findings) -> str:
    """Return variables that no optimizer trains and that differ when gradients begin to; "" without one.

    A difference alone says nothing: a step may add up the ranks' parts at its end.
    """
    names = [each.variable for each in found.states if each.step <= found.begins()]
    return ", ".join(list(dict.fromkeys(names))[:_SHOWN])


def _is_scaled(found: Findings) -> bool:
    """Return True if gradients are right, and the updates are as many times as large as there are ranks."""
    ratios = [each.ratio or 0 for each in found.first_of(found.updates)]
    return not found.first_of(found.gradients) and all(abs(ratio / found.size - 1) < 0.1 for ratio in ratios)


def _line(kind: str) -> Callable[[Findings], str]:
    """Return the finder of the first line in which a rank makes a call of this kind."""
    return lambda found: str(next((call["line"] for call in found.ranks[0].calls(kind)), ""))


def _averaged(kind: str) -> Callable[[Findings], bool]:
    """Return the predicate of a sum that is averaged, where the script makes a call of this kind."""
    return lambda found: found.is_ratio(1 / found.size) and bool(_line(kind)(found))


def _variables(found: Findings) -> str:
    """Return the gradients that differ first, a line each."""
    first, lines = found.first_of(found.gradients), []
    for each in first[:_SHOWN]:
        ratio = "another direction" if each.ratio is None else f"{each.ratio:.3f} of one process's"
        lines.append(f"  {each.variable}: {ratio}, off by {each.off:.1e} of its norm (rounding: {each.allowed:.0e})")
    more = [f"  and {len(first) - _SHOWN} more variables"] if len(first) > _SHOWN else []
    return f"From step {found.begins()} on these gradients differ:\n" + "\n".join([*lines, *more])


_REDUCE = "What to do: gradients = npu.distribute.all_reduce(gradients)"

_ADAPTED = Cause(
    "adapted to a part",
    _adapted,
    "a layer has adapted to other data than in one process, or to other data on each rank: {line}.\nWhat to do: call "
    "adapt before the data are divided, or on all of them.",
    _adapted,
)

SAMPLES: tuple[Cause, ...] = (
    _ADAPTED,
    Cause(
        "seed of each rank's own",
        _other_seed,
        "shuffled with a seed of each rank's own, {line}: some samples are read several times, others never.\nWhat to "
        "do: give shuffle the same seed on every rank, or call it after npu.distribute.shard_and_rebatch_dataset.",
        _other_seed,
    ),
    Cause(
        "same samples",
        _same_everywhere,
        "all {size} ranks read the same samples.\nWhat to do: dataset, batch = "
        "npu.distribute.shard_and_rebatch_dataset(dataset, global_batch) before shuffle and batch; or "
        "npu.distribute.replicate(model) for fit.",
    ),
    Cause(
        "other samples",
        lambda found: True,
        "the ranks' batches together aren't the batch of one process.\nWhat to do: divide the data with "
        "npu.distribute.shard_and_rebatch_dataset, the global batch as its argument, and seed every random order.",
    ),
)

CAUSES: tuple[Cause, ...] = (
    _ADAPTED,
    Cause(
        "different starts",
        Findings.starts_differ,
        "the ranks start with different variables.\nWhat to do: npu.distribute.broadcast(model.variables) once they "
        "exist.",
    ),
    Cause(
        "discarded result",
        _thrown_away,
        f"each rank applies its own gradients: the result of all_reduce is thrown away, {{line}}.\n{_REDUCE}.",
        _thrown_away,
    ),
    Cause(
        "only the loss is reduced",
        _only_scalars,
        f"each rank applies its own gradients: only single numbers are reduced, {{line}}.\n{_REDUCE}.",
        _line("all_reduce"),
    ),
    Cause(
        "clipped before the reduction",
        lambda found: not found.ranks_differ() and found.ratio() is None and bool(_clipped(found)),
        "gradients are clipped on each rank before they are reduced, {line}.\nWhat to do: reduce them first, and clip "
        "the result.",
        _clipped,
    ),
    Cause(
        "not reduced",
        Findings.ranks_differ,
        f"each rank applies its own gradients: nothing reduces those of this optimizer.\n{_REDUCE}, "
        "npu.distribute.DistributedOptimizer(optimizer), or npu.distribute.replicate(model) for fit; a loaded or "
        "cloned model is another one.",
    ),
    Cause(
        "add_loss per sample",
        _averaged("add_loss"),
        "gradients are {ratio} of one process's: a loss with one value per sample is averaged as if it were a mean, "
        "add_loss in {line}.\nWhat to do: pass its mean.",
        _line("add_loss"),
    ),
    Cause(
        "global batch size",
        _averaged("compute_average_loss"),
        "gradients are {ratio} of one process's: the loss is divided by the global batch size and then averaged over "
        "the ranks, {line}.\nWhat to do: tf.reduce_mean(losses), or all_reduce(gradients, 'sum').",
        _line("compute_average_loss"),
    ),
    Cause(
        "sum averaged",
        lambda found: found.is_ratio(1 / found.size),
        "gradients are {ratio} of one process's in all variables: a sum over samples, or a division by the global "
        "batch size, is averaged over the ranks as if it were a mean.\nWhat to do: take the mean of the rank's "
        "samples, or reduce with 'sum'.",
    ),
    Cause(
        "mean summed",
        lambda found: found.is_ratio(found.size),
        "gradients are {ratio} times one process's: means of the ranks are added up, or reduced twice. {line}\nWhat to "
        "do: reduce them once, with 'mean'.",
        _line("all_reduce"),
    ),
    Cause(
        "state in the step",
        _state,
        "a variable that no optimizer trains gets another value in the step than in one process: {line}.\nWhat to do: "
        "compute it from all ranks' samples, with npu.distribute.all_reduce or npu.distribute.all_gather.",
        _state,
    ),
    Cause(
        "scaled rate",
        lambda found: found.updates and _is_scaled(found),
        "gradients are those of one process, and the updates are {size} times as large: the learning rate is "
        "multiplied by the number of ranks.\nWhat to do: leave it as it is, unless the global batch is "
        "larger than the single process's.",
    ),
    Cause(
        "other updates",
        lambda found: found.updates and not found.first_of(found.gradients),
        "gradients are those of one process, but the updates aren't: the optimizer or its learning rate depends on the "
        "rank or on the number of ranks.",
    ),
    Cause(
        "unknown",
        lambda found: bool(found.gradients),
        "the cause is unknown. {line}\nLikely: the loss or a layer compares or mixes the samples of a batch, of which "
        "a rank has only its share (see npu.distribute.all_gather), or divides by something else than the number of "
        "samples.",
        _variables,
    ),
    Cause(
        "other logs",
        Findings.other_logs,
        "the ranks train as one process does, but a number in the logs of fit isn't one process's: {line}.\nWhat to "
        "do: let train_step return the results of metrics, or means over samples.",
        Findings.other_logs,
    ),
)
"""Most specific first."""


def cause_of(found: Findings) -> Cause | None:
    """Return the most specific cause; None if N ranks do what one process does."""
    table = SAMPLES if found.samples() else CAUSES
    return next((cause for cause in table if cause.applies(found)), None)
