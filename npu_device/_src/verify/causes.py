"""The causes that ``npurun verify`` knows, most specific first: what has to be seen, and what to say of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Callable

import numpy as np

from npu_device._src.verify.compare import Deviation, Record, Step, deviations, equal, together, union

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
    """

    one: Record
    again: Record
    ranks: Sequence[Record]
    steps: Sequence[tuple[Step, ...]]
    gradients: list[Deviation] = field(default_factory=list)
    updates: list[Deviation] = field(default_factory=list)

    @property
    def size(self) -> int:
        """Return the number of ranks."""
        return len(self.ranks)

    def first(self) -> tuple[Step, tuple[Step, ...]]:
        """Return the first step of the single process and of the ranks."""
        return self.steps[0][0], self.steps[0][2:]

    def begins(self) -> int:
        """Return the first step in which something differs; later ones follow from it. 0 if nothing does."""
        return min((each.step for each in (*self.gradients, *self.updates)), default=0)

    def other_gradients(self) -> list[Deviation]:
        """Return the gradients that differ in the first step in which something does."""
        return [each for each in self.gradients if each.step == self.begins()]

    def ratio(self) -> float | None:
        """Return the multiple of one process's that all deviating gradients of that step are."""
        first = self.other_gradients()
        ratios = [each.ratio for each in first]
        if not first or any(ratio is None for ratio in ratios):
            return None
        values = np.array(ratios, float)
        return float(values.mean()) if np.ptp(values) < 0.1 * abs(values.mean()) else None

    def is_ratio(self, wanted: float) -> bool:
        """Return True if all deviating gradients are this multiple."""
        ratio = self.ratio()
        return ratio is not None and abs(ratio - wanted) < 0.1 * wanted

    def ranks_differ(self) -> bool:
        """Return True if the ranks apply different gradients in the first step."""
        _, ranks = self.first()
        return any(not equal(step.gradients, ranks[0].gradients) for step in ranks[1:])

    def starts_differ(self) -> bool:
        """Return True if the ranks have different weights before the first step."""
        _, ranks = self.first()
        return any(not equal(step.weights, ranks[0].weights) for step in ranks[1:])


def find(one: Record, again: Record, ranks: Sequence[Record]) -> Findings:
    """Compare the records of one process with those of several ranks."""
    steps = together([one, again, *ranks])
    found = Findings(one, again, ranks, steps)
    names = [one.facts["variables"][str(step[0].optimizer)] for step in steps]
    series = [[step[who].gradients for step in steps] for who in (0, 1, 2)]
    found.gradients = deviations(series[0], series[1], series[2], names)
    updates = [[_updates(steps, who, number) for number in range(len(steps))] for who in (0, 1, 2)]
    kept = [number for number in range(len(steps)) if updates[0][number] is not None]
    if kept:
        chosen = [[series[number] for number in kept] for series in updates]
        found.updates = deviations(chosen[0], chosen[1], chosen[2], [names[number] for number in kept])  # type: ignore[arg-type]
    return found


def _updates(steps: Sequence[tuple[Step, ...]], who: int, number: int) -> np.ndarray | None:
    """Return what a step has added to the weights: norms can't be subtracted, projections can."""
    mine = steps[number][who]
    for later in steps[number + 1 :]:
        if later[who].optimizer == mine.optimizer:
            return later[who].weights[:, 1:] - mine.weights[:, 1:]
    return None


def samples(found: Findings) -> str:
    """Return what is wrong with the samples, "" if nothing is."""
    lines = []
    for number, (mine, _, *ranks) in enumerate(found.steps, start=1):
        theirs = union(ranks)
        if theirs == mine.rows:
            continue
        twice, never = sum((theirs - mine.rows).values()), sum((mine.rows - theirs).values())
        lines.append(
            f"step {number}: one process reads {sum(mine.rows.values())} samples, the ranks together "
            f"{sum(theirs.values())}; {never} of the process's are not among them, and {twice} are others or repeated"
        )
    return "\n".join(lines[:_SHOWN])


@dataclass(frozen=True)
class Cause:
    """A cause: its name, when it is one, and what it means.

    Attributes:
        name: for the table of docs/verify.md.
        applies: looks at the findings.
        text: what it means and what to do, with ``{size}`` ranks, the gradients' ``{ratio}`` and the ``{line}``.
        line: finds the line of the script.
    """

    name: str
    applies: Callable[[Findings], bool]
    text: str
    line: Callable[[Findings], str] = lambda _: ""

    def said(self, found: Findings) -> str:
        """Return the text."""
        ratio = found.ratio()
        return self.text.format(size=found.size, ratio=f"{ratio:.2f}" if ratio else "", line=self.line(found))


def _same_everywhere(found: Findings) -> bool:
    _, ranks = found.first()
    return bool(ranks[0].rows) and all(step.rows == ranks[0].rows for step in ranks[1:])


def _other_seed(found: Findings) -> str:
    """Return the line of a shuffle whose seed differs between ranks; "" without one."""
    by_rank = [{call["number"]: call for call in record.calls("shuffle")} for record in found.ranks]
    for number, call in by_rank[0].items():
        if any(other.get(number, call)["seed"] != call["seed"] for other in by_rank[1:]):
            return str(call["line"])
    return ""


def _thrown_away(found: Findings) -> str:
    """Return the line whose all_reduce was given just the gradients that each rank then applies; "" without one."""
    _, ranks = found.first()
    given = [line for line, values in ranks[0].reduced if len(values) and equal(values, ranks[0].gradients)]
    return given[0] if found.ranks_differ() and given else ""


def _only_scalars(found: Findings) -> bool:
    calls = found.ranks[0].calls("all_reduce")
    return found.ranks_differ() and bool(calls) and all(call["values"] <= 1 for call in calls)


def _clipped(found: Findings) -> str:
    return _line("clip_by_global_norm")(found) or _line("clip_by_norm")(found)


def _is_scaled(found: Findings) -> bool:
    """Return True if gradients are right, and the updates are as many times as large as there are ranks."""
    first = [each.ratio for each in found.updates if each.step == found.begins()]
    near = [ratio is not None and abs(ratio - found.size) < 0.1 * found.size for ratio in first]
    return not found.other_gradients() and bool(near) and all(near)


def _line(kind: str) -> Callable[[Findings], str]:
    """Return the finder of the first line in which a rank makes a call of this kind."""
    return lambda found: str(next((call["line"] for call in found.ranks[0].calls(kind)), ""))


def _averaged(kind: str) -> Callable[[Findings], bool]:
    """Return the predicate of a sum that is averaged, where the script makes a call of this kind."""
    return lambda found: found.is_ratio(1 / found.size) and bool(_line(kind)(found))


def _variables(found: Findings) -> str:
    """Return the gradients that differ first, a line each."""
    first, lines = found.other_gradients(), []
    for each in first[:_SHOWN]:
        ratio = "another direction" if each.ratio is None else f"{each.ratio:.3f} of one process's"
        lines.append(f"  {each.variable}: {ratio}, off by {each.off:.1e} of its norm (rounding: {each.allowed:.0e})")
    more = [f"  and {len(first) - _SHOWN} more variables"] if len(first) > _SHOWN else []
    return f"From step {found.begins()} on these gradients differ:\n" + "\n".join([*lines, *more])


_REDUCE = "What to do: gradients = npu.distribute.all_reduce(gradients)"

SAMPLES: tuple[Cause, ...] = (
    Cause(
        "seed of each rank's own",
        lambda found: bool(_other_seed(found)),
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
    Cause(
        "different starts",
        Findings.starts_differ,
        "the ranks start with different variables.\nWhat to do: npu.distribute.broadcast(model.variables) once they "
        "exist.",
    ),
    Cause(
        "discarded result",
        lambda found: bool(_thrown_away(found)),
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
        "scaled rate",
        _is_scaled,
        "gradients are those of one process, and the updates are {size} times as large: the learning rate is "
        "multiplied by the number of ranks.\nWhat to do: leave it as it is, unless the global batch is "
        "larger than the single process's.",
    ),
    Cause(
        "other updates",
        lambda found: not found.other_gradients() and bool(found.updates),
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
)
"""Most specific first."""


def cause_of(found: Findings) -> Cause | None:
    """Return the most specific cause; None if N ranks do what one process does."""
    table = SAMPLES if samples(found) else CAUSES
    return next((cause for cause in table if cause.applies(found)), None)
