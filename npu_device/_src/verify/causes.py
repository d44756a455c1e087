"""The causes that ``npurun verify`` knows, most specific first: what has to be seen, and what to say of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Callable, NamedTuple

import numpy as np

from npu_device._src.verify import compare
from npu_device._src.verify.compare import GRADIENT, STATE, UPDATE, Deviation, Record, Step

_SHOWN = 5


class Findings:
    """Everything that is compared for one number of ranks.

    Args:
        one: the single process; what stands for it if the script uses Horovod's names.
        again: the same with inputs that differ in the last bit.
        ranks: the ranks' records.

    Attributes:
        steps: those that all processes have made; the single process's first.
        deviations: what differs on rank 0, and of variables that no optimizer trains on any rank.
        begins: the first step in which gradients or updates differ; later ones follow from it. 0 if none do.
    """

    def __init__(self, one: Record, again: Record, ranks: Sequence[Record]) -> None:
        self.one, self.again, self.ranks, self.size = one, again, ranks, len(ranks)
        self.steps: list[tuple[Step, ...]] = list(zip(one.steps, *(record.steps for record in ranks)))
        found = [compare.compare(one, again, record) for record in ranks]
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

    def _differ(self, number: int, name: str) -> bool:
        """Return True if the ranks' gradients, or the trained weights before a step, differ from each other."""
        steps = self.steps[number][1:] if number < len(self.steps) else ()
        values = [getattr(step, name)[: step.trained] for step in steps]
        return not all(compare.equal(each, values[0]) for each in values[1:])

    # Each of the following returns what it has found as text, or True; "" or False if it isn't so.

    def adapted(self) -> str:
        """A layer has adapted to something else than the single process's."""
        for number, mine in enumerate(self.one.of("adapted")):
            calls = [record.of("adapted")[number : number + 1] for record in self.ranks]
            if any(call and not np.allclose(call[0]["state"], mine["state"], rtol=1e-3) for call in calls):
                return f"{mine['layer']!r}, {mine['line']}"
        return ""

    def other_seed(self) -> str:
        """A shuffle has another seed on each rank."""
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

    def other_samples(self) -> str:
        """The ranks together don't read one process's samples.

        As many other ones in a step without other gradients are a generator's: the same but for rounding.
        """
        lines = []
        for number, (mine, *ranks) in enumerate(self.steps, start=1):
            theirs = compare.union(ranks)
            counts = sum(mine.rows.values()), sum(theirs.values())
            if theirs != mine.rows and (number <= self.begins or counts[0] != counts[1]):
                lines.append(
                    f"step {number}: one process reads {counts[0]} samples, the ranks together "
                    f"{counts[1]}; {sum((mine.rows - theirs).values())} of the process's are not among "
                    f"them, and {sum((theirs - mine.rows).values())} are others or repeated"
                )
        return "\n".join(lines[:_SHOWN])

    def starts_differ(self) -> bool:
        """The ranks have different weights before the first step. Horovod's scripts may send them after it."""
        return self._differ(1 if self.one.horovod else 0, "weights")

    def not_reduced(self) -> bool:
        """The ranks apply different gradients in the first step, or have other weights after it."""
        return self._differ(0, "gradients") or self._differ(1, "weights")

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

    def averaged(self, kind: str = "") -> str | bool:
        """A sum is averaged; the line where a call of this kind makes it."""
        return self.is_ratio(1 / self.size) and (self.line(kind) if kind else True)

    def summed(self) -> str | bool:
        """Means are added up."""
        return self.is_ratio(self.size) and (self.line("all_reduce") or True)

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
        """The gradients that differ first, a line each."""
        lines = []
        for each in self.first()[:_SHOWN]:
            ratio = "another direction" if each.ratio is None else f"{each.ratio:.3f} of it"
            lines.append(f"  {each.variable}: {ratio}, off by {each.off:.1e} (rounding: {each.allowed:.0e})")
        more = len(self.first()) - _SHOWN
        return "\n".join(lines + [f"  and {more} more variables"] * (more > 0))

    def other_logs(self) -> str:
        """The ranks agree on a loss or metric, which isn't one process's."""
        for number, (again, mine, *ranks) in enumerate(zip(self.again.steps, *zip(*self.steps)), start=1):
            for name, value in mine.logs.items():
                found = [step.logs.get(name, np.nan) for step in ranks]
                allowed = 30 * abs(again.logs.get(name, value) - value) + 1e-4 * abs(value) + 1e-6
                if np.ptp(found) <= allowed < abs(found[0] - value):
                    return f"{name} of step {number} is {found[0]:.6g} instead of {value:.6g}"
        return ""


class Cause(NamedTuple):
    """A cause.

    Attributes:
        name: for the table of docs/verify.md.
        seen: looks at the findings: is it so, and where?
        text: what it means, with ``{size}`` ranks, the gradients' ``{ratio}``, and what was ``{seen}``.
        remedy: what to do.
    """

    name: str
    seen: Callable[[Findings], str | bool]
    text: str
    remedy: str


_REDUCE = "gradients = npu.distribute.all_reduce(gradients)"
_OF_ONE = "gradients are {ratio:.2f} of one process's: "
RANDOM = Cause(
    "random numbers",
    lambda found: found.drawn() if found.first() else "",
    "the step draws random numbers itself: {seen}",
    "let them depend on the samples alone (tf.random.stateless_normal), or leave them out while you verify",
)
NO_CALL = Cause(
    "no call",
    lambda found: not all(record.joined for record in found.ranks),
    "the script makes no call of npu_device, so that each rank trains a model of its own",
    "npurun port shows what to add; see npurun docs recipes",
)
CAUSES = (
    NO_CALL,
    Cause(
        "adapted to a part",
        Findings.adapted,
        "a layer has adapted to other data than in one process, or to other data on each rank: {seen}",
        "call adapt before the data are divided, or on all of them",
    ),
    Cause(
        "seed of each rank's own",
        lambda found: found.other_samples() and found.other_seed(),
        "shuffled with a seed of each rank's own, {seen}: some samples are read several times, others never",
        "give shuffle the same seed on every rank, or call it after npu.distribute.shard_and_rebatch_dataset",
    ),
    Cause(
        "different starts",
        Findings.starts_differ,
        "the ranks start with different variables",
        "npu.distribute.broadcast(model.variables) once they exist",
    ),
    Cause(
        "discarded result",
        Findings.thrown_away,
        "each rank applies its own gradients: the result of all_reduce is thrown away, {seen}",
        _REDUCE,
    ),
    Cause(
        "only the loss is reduced",
        Findings.only_scalars,
        "each rank applies its own gradients: only single numbers are reduced, {seen}",
        _REDUCE,
    ),
    Cause(
        "not reduced",
        Findings.not_reduced,
        "each rank applies its own gradients: nothing reduces those of this optimizer",
        f"{_REDUCE}, npu.distribute.DistributedOptimizer(optimizer), or npu.distribute.replicate(model) for fit; a "
        "loaded or cloned model is another one",
    ),
    Cause(
        "same samples",
        lambda found: found.other_samples() and found.same_samples(),
        "all {size} ranks read the same samples",
        "dataset, batch = npu.distribute.shard_and_rebatch_dataset(dataset, global_batch) before shuffle and batch; or "
        "npu.distribute.replicate(model) for fit",
    ),
    RANDOM._replace(seen=lambda found: found.drawn() if found.other_samples() else ""),
    Cause(
        "other samples",
        Findings.other_samples,
        "the ranks' batches together aren't the batch of one process.\n{seen}",
        "divide the data with npu.distribute.shard_and_rebatch_dataset, the global batch as its argument, and seed "
        "every random order",
    ),
    Cause(
        "clipped before the reduction",
        Findings.clipped,
        "gradients are clipped on each rank before they are reduced, {seen}",
        "reduce them first, and clip the result",
    ),
    Cause(
        "add_loss per sample",
        lambda found: found.averaged("add_loss"),
        _OF_ONE + "a loss with one value per sample is averaged as if it were a mean, add_loss in {seen}",
        "pass its mean",
    ),
    Cause(
        "global batch size",
        lambda found: found.averaged("compute_average_loss"),
        _OF_ONE + "the loss is divided by the global batch size and then averaged over the ranks, {seen}",
        "tf.reduce_mean(losses), or all_reduce(gradients, 'sum')",
    ),
    Cause(
        "sum averaged",
        Findings.averaged,
        _OF_ONE + "a sum over samples, or a division by the global batch size, is averaged over the ranks as if it "
        "were a mean",
        "take the mean of the rank's samples, or reduce with 'sum'",
    ),
    Cause(
        "mean summed",
        Findings.summed,
        _OF_ONE + "means of the ranks are added up, or reduced twice, {seen}",
        "reduce them once, with 'mean'",
    ),
    Cause(
        "state in the step",
        Findings.state,
        "a variable that no optimizer trains gets another value in the step than in one process: {seen}",
        "compute it from all ranks' samples, with npu.distribute.all_reduce or npu.distribute.all_gather",
    ),
    Cause(
        "scaled rate",
        Findings.scaled,
        "gradients are those of one process, and the updates are {size} times as large: the learning rate is "
        "multiplied by the number of ranks",
        "leave it as it is, unless the global batch is larger than the single process's",
    ),
    Cause(
        "other updates",
        Findings.only_updates,
        "gradients are those of one process, but the updates aren't",
        "let neither the optimizer nor its learning rate depend on the rank or on the number of ranks",
    ),
    RANDOM,
    Cause(
        "unknown",
        Findings.variables,
        "from step {begins} on, gradients aren't one process's; the cause is unknown:\n{seen}\nLikely, the loss or a "
        "layer compares or mixes the samples of a batch, of which a rank has only its share, or divides by something "
        "else than the number of samples",
        "see npu.distribute.all_gather",
    ),
    Cause(
        "other logs",
        Findings.other_logs,
        "the ranks train as one process does, but a number in the logs of fit isn't one process's: {seen}",
        "let train_step return the results of metrics, or means over samples",
    ),
)
HOROVOD = (
    Cause(
        "not reduced",
        lambda found: found.not_reduced() and bool(found.first()),
        "each rank applies its own gradients",
        "apply what hvd.DistributedGradientTape(tape) gives, or compile with hvd.DistributedOptimizer(optimizer)",
    ),
    Cause(
        "different starts",
        Findings.starts_differ,
        "the ranks have different variables after the first step",
        "hvd.broadcast_variables(model.variables, root_rank=0), and of the optimizer, before or after the first step; "
        "or BroadcastGlobalVariablesCallback(0)",
    ),
    Cause(
        "not the average",
        Findings.variables,
        "from step {begins} on, reduced gradients aren't the average of the ranks':\n{seen}",
        "reduce them once, with op=hvd.Average; clip them after that",
    ),
)
"""Each table: most specific first."""


def cause_of(found: Findings) -> tuple[str, str]:
    """Return name and text of the most specific cause; both "" if N ranks do what one process does."""
    for cause in HOROVOD if found.one.horovod else CAUSES:
        seen = cause.seen(found)
        if seen:
            text = cause.text.format(size=found.size, ratio=found.ratio(), begins=found.begins, seen=seen)
            return cause.name, f"{text}.\nWhat to do: {cause.remedy}."
    return "", ""
