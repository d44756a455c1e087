"""The causes that ``npurun verify`` knows, most specific first: what has to be seen, and what to say of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Callable, Optional

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

    def line_of(self, kind: str) -> str:
        """Return the first line in which a rank makes a call of this kind; "" if none does."""
        calls = self.ranks[0].calls(kind)
        return calls[0]["line"] if calls else ""

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
    """A cause: its name, when it is one, and what it means with what to do."""

    name: str
    applies: Callable[[Findings], bool]
    text: Callable[[Findings], str]


def _same_everywhere(found: Findings) -> bool:
    _, ranks = found.first()
    return bool(ranks[0].rows) and all(step.rows == ranks[0].rows for step in ranks[1:])


def _seeds_differ(found: Findings) -> Optional[str]:
    by_rank = [{call["number"]: call for call in record.calls("shuffle")} for record in found.ranks]
    for number, call in by_rank[0].items():
        if any(other.get(number, call)["seed"] != call["seed"] for other in by_rank[1:]):
            return str(call["line"])
    return None


def _thrown_away(found: Findings) -> Optional[str]:
    """Return the line whose all_reduce was given just the gradients that each rank then applies."""
    _, ranks = found.first()
    for line, values in ranks[0].reduced:
        if len(values) and equal(values, ranks[0].gradients):
            return line
    return None


def _only_scalars(found: Findings) -> bool:
    return all(call["values"] <= 1 for call in found.ranks[0].calls("all_reduce"))


def _unknown(found: Findings) -> str:
    first, lines = found.other_gradients(), []
    for each in first[:_SHOWN]:
        ratio = "another direction" if each.ratio is None else f"{each.ratio:.3f} of one process's"
        lines.append(f"  {each.variable}: {ratio}, off by {each.off:.1e} of its norm (rounding: {each.allowed:.0e})")
    lines += [f"  and {len(first) - _SHOWN} more variables"] if len(first) > _SHOWN else []
    return (
        f"the cause is unknown. From step {found.begins()} on these gradients differ:\n"
        + "\n".join(lines)
        + "\nLikely: the "
        "loss or a layer compares or mixes the samples of a batch, of which a rank has only its share (see "
        "npu.distribute.all_gather), or divides by something else than the number of samples."
    )


SAMPLES: tuple[Cause, ...] = (
    Cause(
        "seed of each rank's own",
        lambda found: _seeds_differ(found) is not None,
        lambda found: (
            f"shuffled with a seed of each rank's own, {_seeds_differ(found)}: some samples are read several "
            "times, others never.\nWhat to do: give shuffle the same seed on every rank, or call it after "
            "npu.distribute.shard_and_rebatch_dataset."
        ),
    ),
    Cause(
        "same samples",
        _same_everywhere,
        lambda found: (
            f"all {found.size} ranks read the same samples.\nWhat to do: dataset, batch = "
            "npu.distribute.shard_and_rebatch_dataset(dataset, global_batch) before shuffle and batch; or "
            "npu.distribute.replicate(model) for fit."
        ),
    ),
    Cause(
        "other samples",
        lambda found: True,
        lambda found: (
            "the ranks' batches together aren't the batch of one process.\nWhat to do: divide the data with "
            "npu.distribute.shard_and_rebatch_dataset, the global batch as its argument, and seed every random order."
        ),
    ),
)

CAUSES: tuple[Cause, ...] = (
    Cause(
        "different starts",
        Findings.starts_differ,
        lambda found: (
            "the ranks start with different variables.\nWhat to do: npu.distribute.broadcast(model.variables) "
            "once they exist."
        ),
    ),
    Cause(
        "discarded result",
        lambda found: found.ranks_differ() and _thrown_away(found) is not None,
        lambda found: (
            f"each rank applies its own gradients: the result of all_reduce is thrown away, "
            f"{_thrown_away(found)}.\nWhat to do: gradients = npu.distribute.all_reduce(gradients)."
        ),
    ),
    Cause(
        "only the loss is reduced",
        lambda found: found.ranks_differ() and bool(found.line_of("all_reduce")) and _only_scalars(found),
        lambda found: (
            f"each rank applies its own gradients: only single numbers are reduced, "
            f"{found.line_of('all_reduce')}.\nWhat to do: gradients = npu.distribute.all_reduce(gradients)."
        ),
    ),
    Cause(
        "clipped before the reduction",
        lambda found: not found.ranks_differ() and found.ratio() is None and bool(_clipped(found)),
        lambda found: (
            f"gradients are clipped on each rank before they are reduced, {_clipped(found)}.\nWhat to do: "
            "reduce them first, and clip the result."
        ),
    ),
    Cause(
        "not reduced",
        Findings.ranks_differ,
        lambda found: (
            "each rank applies its own gradients: nothing reduces those of this optimizer.\nWhat to do: "
            "gradients = npu.distribute.all_reduce(gradients), npu.distribute.DistributedOptimizer(optimizer), or "
            "npu.distribute.replicate(model) for fit; a loaded or cloned model is another one."
        ),
    ),
    Cause(
        "add_loss per sample",
        lambda found: found.is_ratio(1 / found.size) and bool(found.line_of("add_loss")),
        lambda found: (
            f"gradients are {found.ratio():.2f} of one process's: a loss with one value per sample is "
            f"averaged as if it were a mean, add_loss in {found.line_of('add_loss')}.\nWhat to do: pass its mean."
        ),
    ),
    Cause(
        "global batch size",
        lambda found: found.is_ratio(1 / found.size) and bool(found.line_of("compute_average_loss")),
        lambda found: (
            f"gradients are {found.ratio():.2f} of one process's: the loss is divided by the global batch "
            f"size and then averaged over the ranks, {found.line_of('compute_average_loss')}.\nWhat to do: "
            "tf.reduce_mean(losses), or all_reduce(gradients, 'sum')."
        ),
    ),
    Cause(
        "sum averaged",
        lambda found: found.is_ratio(1 / found.size),
        lambda found: (
            f"gradients are {found.ratio():.2f} of one process's in all variables: a sum over samples, or a "
            "division by the global batch size, is averaged over the ranks as if it were a mean.\nWhat to do: take the "
            "mean of the rank's samples, or reduce with 'sum'."
        ),
    ),
    Cause(
        "mean summed",
        lambda found: found.is_ratio(found.size),
        lambda found: (
            f"gradients are {found.ratio():.2f} times one process's: means of the ranks are added up "
            f"({found.line_of('all_reduce') or 'a reduction with sum'}), or reduced twice.\nWhat to do: reduce "
            "them once, with 'mean'."
        ),
    ),
    Cause(
        "scaled rate",
        lambda found: not found.other_gradients() and _all_ratios(found, found.size),
        lambda found: (
            f"gradients are those of one process, and the updates are {found.size} times as large: the "
            "learning rate is multiplied by the number of ranks.\nWhat to do: leave it as it is, unless the global "
            "batch is larger than the single process's."
        ),
    ),
    Cause(
        "other updates",
        lambda found: not found.other_gradients() and bool(found.updates),
        lambda found: (
            "gradients are those of one process, but the updates aren't: the optimizer or its learning rate "
            "depends on the rank or on the number of ranks."
        ),
    ),
    Cause("unknown", lambda found: bool(found.gradients), _unknown),
)
"""Most specific first."""


def _clipped(found: Findings) -> str:
    return found.line_of("clip_by_global_norm") or found.line_of("clip_by_norm")


def _all_ratios(found: Findings, wanted: float) -> bool:
    first = [each.ratio for each in found.updates if each.step == found.begins()]
    return bool(first) and all(ratio is not None and abs(ratio - wanted) < 0.1 * wanted for ratio in first)


def cause_of(found: Findings) -> Cause | None:
    """Return the most specific cause; None if N ranks do what one process does."""
    table = SAMPLES if samples(found) else CAUSES
    return next((cause for cause in table if cause.applies(found)), None)
