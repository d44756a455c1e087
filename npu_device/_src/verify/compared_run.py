"""What is compared for one number of ranks: their steps beside those of one process, and where they deviate first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from npu_device._src.comparison import compare, topics
from npu_device._src.comparison.compare import (
    GRADIENT,
    STATE,
    UPDATE,
    Deviation,
    Record,
    RecordedCall,
    RecordedStep,
)
from npu_device._src.comparison.trial import TIMES_ROUNDING, Trial

_SHOWN = 5


def first_names(names: Sequence[str]) -> str:
    """Return the first few of some names, as text."""
    return ", ".join(names[:_SHOWN])


def _total(rows: Counter[int]) -> int:
    return sum(rows.values())


@dataclass(frozen=True)
class ComparedStep:
    """A step in one process, in the one with perturbed inputs, and on all ranks."""

    number: int  # from 1
    single: RecordedStep
    perturbed: RecordedStep
    ranks: Sequence[RecordedStep]
    # By quantity: rank 0's of gradients and updates, as differences between ranks have causes of their own. Variables
    # that no optimizer trains may deviate on any rank.
    deviations: dict[str, list[Deviation]]

    def ranks_differ(self, attribute: str) -> bool:
        """Return True if the gradients of the ranks, or their trained weights, differ from each other."""
        arrays = [getattr(step, attribute)[: step.trained] for step in self.ranks]
        return not all(compare.equal(array, arrays[0]) for array in arrays[1:])

    def rank_with_other_variables(self) -> int | None:
        """Return the first rank that trains more variables than one process, or fewer; None if no rank does."""
        ranks = enumerate(self.ranks)
        return next((rank for rank, step in ranks if step.trained != self.single.trained), None)

    def uncommon_variables(self, rank: int) -> list[str]:
        """Return the variables that one process trains and a rank doesn't, or that only the rank trains."""
        names = dict.fromkeys([*self.single.trained_names, *self.ranks[rank].trained_names])
        common = {*self.single.trained_names} & {*self.ranks[rank].trained_names}
        return [name for name in names if name not in common]

    def unlike_perturbed(self) -> str:
        """Return what the perturbed process does unlike the single one, if only by rounding; "" for nothing."""
        trained = self.single.trained
        if self.perturbed.trained != trained:
            return "trains other variables"
        if self.perturbed.rows != self.single.rows:
            return "reads different samples"
        # Rounding may have changed the variables of later steps.
        if self.number > 1:
            return ""
        if not compare.equal(self.perturbed.weights[:trained], self.single.weights[:trained]):
            return "begins with different variables"
        # Only models whose samples are known have had their inputs changed.
        if not self.single.rows:
            return "computes different gradients"
        return ""

    @property
    def change(self) -> float:
        """Return how far perturbed inputs move most gradients, relative to their norms."""
        return compare.typical_change(self.single, self.perturbed)

    @property
    def shows_deviations(self) -> bool:
        """Return True if gradients that aren't those of one process would deviate: rounding allows less than that."""
        has_as_many = self.perturbed.trained == self.single.trained
        return has_as_many and self.change * TIMES_ROUNDING <= 1

    def other_samples(self, shows: bool = True) -> str:
        """Return which samples the ranks together read, unlike one process; "" if they are the same.

        As many samples with the same gradients are the same but for rounding, as those of a generator may be; but not
        where gradients never deviate, so that they show nothing.
        """
        alone = self.single.rows
        together = compare.union(self.ranks)
        is_same = shows and self.reads_as_many() and not self.deviations[GRADIENT]
        if alone == together or is_same:
            return ""
        return (
            f"in step {self.number}, one process reads {_total(alone)} samples, and the ranks together "
            f"{_total(together)}; {_total(alone - together)} of the first are missing, and "
            f"{_total(together - alone)} are others or repeated"
        )

    def reads_as_many(self) -> bool:
        """Return True if the ranks together read the same number of samples as one process."""
        return _total(self.single.rows) == _total(compare.union(self.ranks))

    def different_variables(self) -> list[str]:
        """Return the trained variables that rank 0 has with other values than one process before the step."""
        # Rank 0 stands for all, as differences between ranks have causes of their own.
        weights = zip(self.single.trained_names, self.single.weights, self.ranks[0].weights)
        return [name for name, alone, on_rank in weights if not compare.equal(alone, on_rank)]

    def trial_of_log(self, name: str) -> Trial:
        """Return a number in the logs of one process, as a trial whose parts are the numbers of the ranks."""
        number = self.single.logs[name]
        perturbed = self.perturbed.logs.get(name, number)
        # NaN agrees with nothing, so that a number which a rank doesn't log is left out.
        parts = [step.logs.get(name, np.nan) for step in self.ranks]
        return Trial(number, [perturbed], parts)


class ComparedRun:
    """The run of one number of ranks, compared with one process.

    Args:
        single: the single process; what stands for it if the script uses Horovod's names.
        perturbed: the same with inputs that differ in the last bit.
        ranks: the ranks' records.
    """

    def __init__(self, single: Record, perturbed: Record, ranks: Sequence[Record]) -> None:
        # Only steps that all have made are compared.
        records = compare.aligned([single, perturbed, *ranks])
        self.single = records[0]
        self.ranks = records[2:]
        self.size = len(ranks)
        self.steps: list[ComparedStep] = []
        steps_of_all = zip(*(record.steps for record in records))
        of_ranks = zip(*(compare.compare(self.single, records[1], record) for record in self.ranks))
        for steps, deviations in zip(steps_of_all, of_ranks):
            states = [deviation for of_rank in deviations for deviation in of_rank[STATE]]
            by_quantity = {**deviations[0], STATE: states}
            number = len(self.steps) + 1
            step = ComparedStep(number, steps[0], steps[1], steps[2:], by_quantity)
            rank_apart = step.rank_with_other_variables()
            # The tensors of such a step can't be compared.
            if rank_apart is not None:
                names = first_names(step.uncommon_variables(rank_apart))
                step.deviations[GRADIENT].append(Deviation(names, None, 1.0, 0.0))
            self.steps.append(step)
        # The step to explain is the first whose gradients or updates deviate: later ones follow from it. Other
        # variables don't count: a step may add up the ranks' parts of them at its end.
        deviating = (
            step.number
            for step in self.steps
            if step.deviations[GRADIENT] or step.deviations[UPDATE]
        )
        self.first_deviating = next(deviating, 0)  # number of that step, from 1; 0 without one
        self.index = max(self.first_deviating, 1) - 1  # index of that step, or of the first step

    @property
    def step(self) -> ComparedStep:
        """Return the step to explain; if none deviates, the first step."""
        return self.steps[self.index]

    @property
    def phase(self) -> str:
        """Return the phase of the step to explain."""
        return self.step.single.phase

    @property
    def gradients_deviate(self) -> bool:
        """Return True if gradients deviate in the step to explain, and not only its updates."""
        return bool(self.step.deviations[GRADIENT])

    def ratio(self, quantity: str = GRADIENT) -> float:
        """Return the multiple of one process that all deviating tensors of the step to explain are; 0 without one."""
        ratios = np.array([deviation.ratio or 0 for deviation in self.step.deviations[quantity]])
        # One tensor without a ratio is enough: then it isn't a matter of scale.
        if not len(ratios) or not ratios.all():
            return 0.0
        mean = float(ratios.mean())
        # The ratios agree within a tenth, since each gradient has its own rounding.
        if np.ptp(ratios) >= 0.1 * abs(mean):
            return 0.0
        return mean

    def is_ratio(self, expected: float, quantity: str = GRADIENT) -> bool:
        """Return True if ``ratio`` is about as expected."""
        return abs(self.ratio(quantity) - expected) < 0.1 * expected

    def calls(self, *wanted: str) -> list[RecordedCall]:
        """Return the calls of rank 0 on some topics that led to the step to explain.

        A step that is traced once runs many times, so these are the calls before any step of its optimizer. Without
        any, they are those of the optimizer whose step comes next: if several take turns, one call may serve them all,
        and is kept for the one that makes its step first.
        """
        optimizers = [step.optimizer for step in self.ranks[0].steps]
        from_first_step = optimizers[optimizers.index(optimizers[self.index]) :]
        calls = filter(None, map(self.ranks[0].calls_before.get, from_first_step))
        return [call for call in next(calls, []) if call.topic in wanted]

    def line(self, *wanted: str) -> str | None:
        """Return the first of ``calls``, with its line."""
        return next(map(str, self.calls(*wanted)), None)

    def line_in_script(self, topic: str) -> str | None:
        """Return the first call on a topic in the whole script of rank 0, with its line."""
        return next(map(str, self.ranks[0].of(topic)), None)

    def not_repeatable(self) -> str | None:
        """Return what one process does differently when it runs again, perturbed; None if it is rounding.

        Only the first step that differs counts: what the model itself has made may be a sample of a later one.
        """
        for step in self.steps:
            difference = step.unlike_perturbed()
            if difference:
                if compare.differ_by_rounding(self.single, step.single, step.perturbed):
                    return None
                return f"in step {step.number}, the second run {difference}"
        return None

    def lost_in_rounding(self) -> str | None:
        """Return the first step in which rounding moves most gradients so far that no difference would show."""
        for step in self.steps:
            if step.change * TIMES_ROUNDING > 1:
                return (
                    f"most gradients from step {step.number} on: changing inputs in their last bit "
                    f"moves them by {step.change:.0%}"
                )
        return None

    def step_with_other_samples(self) -> ComparedStep | None:
        """Return the first step in which the ranks together read other samples than one process; None without one.

        After the step to explain, only another number of them counts: which samples they are may follow from it.
        """
        for step in self.steps:
            may_explain = step.number <= self.first_deviating or not step.reads_as_many()
            if may_explain and step.other_samples():
                return step
        return None

    def read_same_samples(self) -> bool:
        """Return True if all ranks read the same samples."""
        # The first step is taken if no step has different samples.
        step = self.step_with_other_samples() or self.steps[0]
        rows = step.ranks[0].rows
        return bool(rows) and all(rank.rows == rows for rank in step.ranks)

    def shuffles_unseeded(self) -> bool:
        """Return True if the ranks may really shuffle differently: no seed is set, not in fit either."""
        if self.line_in_script(topics.SEED) is not None:
            return False
        is_fit = bool(self.steps[0].single.logs)
        shuffles = self.ranks[0].of(topics.SHUFFLE)
        return is_fit or any(call.outcome is None for call in shuffles)

    def different_start(self) -> ComparedStep | None:
        """Return the first step of an optimizer before which the ranks have different variables."""
        optimizers = set()
        for step in self.steps[: self.index + 1]:
            if step.single.optimizer not in optimizers and step.ranks_differ("weights"):
                return step
            optimizers.add(step.single.optimizer)
        return None

    def applies_own_gradients(self) -> bool:
        """Return True if the ranks apply different gradients in the step to explain."""
        return self.step.ranks_differ("gradients")

    def clipped(self) -> str | None:
        """Return the call that clips gradients before anything is reduced, even if nothing was above the limit."""
        line = self.line(topics.ALL_REDUCE, topics.CLIP)
        # The first call on either topic has to be one that clips.
        if line != self.line(topics.CLIP):
            return None
        return line

    def described(self, quantity: str) -> str:
        """Return which gradients, or updates, deviate, and how."""
        texts = []
        for deviation in self.step.deviations[quantity]:
            # Tensors without a ratio are described so, even if they differ by less than a tenth.
            how = "points elsewhere"
            if deviation.ratio is not None:
                how = f"is {deviation.ratio:.3f} of it"
            rounding = f"(off by {deviation.relative_error:.0e}, rounding {deviation.allowed:.0e})"
            texts.append(f"{deviation.variable} {how} {rounding}")
        hidden = len(texts) - _SHOWN
        if hidden > 0:
            texts[_SHOWN:] = [f"and {hidden} more"]
        return ", ".join(texts)

    def different_log(self, only_metrics: bool = False) -> str | None:
        """Return a number in the logs on which the ranks agree, but not with one process.

        It is one of the metrics of the model, or any number.
        """
        for step in self.steps:
            for name, number in step.single.logs.items():
                trial = step.trial_of_log(name)
                allowed = trial.allowed(1e-4, 1e-6)
                # Where the ranks differ from each other, the script logs a number of each rank on purpose.
                agree = np.ptp(trial.parts) <= allowed
                is_wanted = name in self.single.metrics or not only_metrics
                if is_wanted and agree and trial.distance(trial.parts[0]) > allowed:
                    numbers = f"{trial.parts[0]:.6g} instead of {number:.6g}"
                    return f"{name} of step {step.number} is {numbers}"
        return None
