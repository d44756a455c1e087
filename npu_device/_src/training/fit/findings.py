"""What the first-step check finds when it compares a step on some samples with the same step on parts of them: which
gradients, losses and numbers are means over the samples, which are sums, and which variables take values of samples.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from npu_device._src.comparison.trial import Trial, norm
from npu_device._src.training.fit.dry_step import DryStep, StepResults
from npu_device._src.training.fit.graph_lines import where
from npu_device._src.training.fit.losses import ADDED_LOSS, LOSS
from npu_device._src.training.fit.metrics import METRIC
from npu_device._src.training.fit.mixing import is_of_gradients, setters_of
from npu_device._src.training.watching.digests import variable_name
from npu_device._src.world.current_step import IsSum

# Fraction of a number: what is nearer is equal, where no tolerance has been measured.
_CLEARLY = 1e-3


@dataclass(frozen=True)
class Runs:
    """The results of the dry runs of a step: on all samples, on all of them again, and on parts of them."""

    whole: StepResults
    repeats: Sequence[StepResults]  # of the same again, and with weights that differ by rounding
    parts: Sequence[StepResults]
    weights: Sequence[float]  # the parts' fractions of the samples
    tolerance: float  # largest difference that counts as rounding, relative
    doubled: Sequence[StepResults] = ()  # of all samples twice, if the step runs on those

    def gradient(self, position: int, is_added_up: bool = False) -> Trial:
        """Return the trial of a gradient; one that is added up over the ranks isn't weighted."""
        gradients = [run.gradients[position] for run in self._all()]
        trial = self._trial(_dense(gradients))
        weights = self.weights
        if is_added_up:
            weights = [1.0] * len(self.parts)
        # Divided again, since the step has multiplied the gradients of parts by their fractions.
        parts = [part / weight for part, weight in zip(trial.parts, weights)]
        return replace(trial, parts=parts, weights=weights)

    def added_loss(self, position: int) -> Trial:
        """Return the trial of a loss that a layer adds."""
        losses = [float(run.losses[position]) for run in self._all()]
        return self._trial(losses)

    def number(self, name: str) -> Trial:
        """Return the trial of a number that the step gives to a loss, a metric or the logs."""
        numbers = [float(run.numbers[name]) for run in self._all()]
        return self._trial(numbers)

    def change(self, position: int, before: np.ndarray) -> Trial | None:
        """Return the trial of what the step adds to a variable; None if that has a new shape."""
        states = [run.state[position] for run in self._all()]
        if any(state.shape != before.shape for state in states):
            return None
        added = [state.astype(np.float64) - before for state in states]
        return self._trial(added)

    def _all(self) -> list[StepResults]:
        return [self.whole, *self.repeats, *self.parts, *self.doubled]

    def _trial(self, arrays: Sequence) -> Trial:
        """Return the trial of a quantity, given its values in all results."""
        whole, *further = arrays
        count = len(self.repeats)
        end = count + len(self.parts)
        doubled = next(iter(further[end:]), None)
        return Trial(whole, further[:count], further[count:end], self.weights, doubled)


@dataclass(frozen=True)
class ComparedGradient:
    """A gradient of all samples, compared with those of the parts."""

    name: str  # name of its variable
    reducer: Any  # the reducer of its optimizer
    error: float  # the difference from the mean over the parts, relative to the gradient
    is_mean: bool  # it is the mean over the parts, as a gradient of 0 is
    is_sum: bool  # it is the sum over the parts, as a gradient of 0 is


def are_repeatable(whole: StepResults, repeat: StepResults) -> bool:
    """Return True if the same samples give the same gradients, but for what some kernels add up in any order."""
    pairs = [_dense(pair) for pair in zip(whole.gradients, repeat.gradients)]
    # Gradients are compared by the size of all of them together: some are nearly 0, and rounded like the rest.
    size = norm([norm(gradient) for gradient, _ in pairs])
    for gradient, again in pairs:
        allowed = 0.01 * (norm(gradient) + size)
        # ``not <=``, because a comparison with NaN is always false.
        if not norm(gradient - again) <= allowed:
            return False
    return True


def are_comparable(whole: StepResults) -> bool:
    """Return True if gradients are finite, and not all 0."""
    sizes = []
    for gradient in whole.gradients:
        [dense] = _dense([gradient])
        sizes.append(norm(dense))
    # Neither holds for NaN.
    return not sizes or 0 < sum(sizes) < np.inf


def compared_gradients(dry_step: DryStep, runs: Runs) -> list[ComparedGradient]:
    """Compare the gradients, the largest difference first."""
    summed = dry_step.step.sums.reducers
    trials = []
    for position, reducer in enumerate(dry_step.reducers):
        trials.append(runs.gradient(position, reducer in summed))
    # The tolerance depends on all gradients: a small one is rounded as those are that it is computed with.
    size = norm([trial.size for trial in trials])
    compared = []
    for variable, reducer, trial in zip(dry_step.variables, dry_step.reducers, trials):
        allowed = trial.allowed(runs.tolerance, 0.01 * runs.tolerance * size)
        # The small number keeps a gradient of 0 from being a divisor.
        error = trial.error_of_mean / (trial.size + 1e-30)
        is_mean = trial.is_mean(allowed)
        is_sum = trial.is_sum(allowed)
        name = variable_name(variable)
        compared.append(ComparedGradient(name, reducer, error, is_mean, is_sum))
    return sorted(compared, key=lambda gradient: -gradient.error)


def are_sums_with_more(runs: Runs, other_cut: Runs) -> bool:
    """Return whether all gradients are sums over the samples and something else, the same for any samples.

    Added up over parts, they have too much of the latter, whatever the parts; ``other_cut`` has parts of other sizes.
    """
    has_excess = False
    for position in range(len(runs.whole.gradients)):
        trial = runs.gradient(position)
        other_trial = other_cut.gradient(position)
        excess = trial.sum_of_parts - trial.whole
        other_excess = other_trial.sum_of_parts - other_trial.whole
        sum_of_samples = trial.whole - excess
        allowed = _CLEARLY * norm(sum_of_samples)
        # ``not <=``, because a comparison with NaN is always false.
        if not norm(excess - other_excess) <= allowed:
            return False
        # The samples twice add their sum once more.
        if trial.doubled is not None:
            added = trial.doubled - trial.whole
            if not norm(added - sum_of_samples) <= allowed:
                return False
        has_excess = has_excess or norm(excess) > _CLEARLY * trial.size
    return has_excess


def sums_of_optimizers(gradients: Sequence[ComparedGradient]) -> dict[Any, bool]:
    """Return for each reducer if all its gradients are sums over the samples, or means; without those of 0,
    and without optimizers that have both (``first_step`` raises an error).
    """
    kinds = {}
    for reducer in dict.fromkeys(gradient.reducer for gradient in gradients):
        gradients_of_optimizer = [gradient for gradient in gradients if gradient.reducer is reducer]
        are_sums = all(gradient.is_sum for gradient in gradients_of_optimizer)
        are_means = all(gradient.is_mean for gradient in gradients_of_optimizer)
        # Both are true only if all gradients are 0, which tells us nothing; both are false if neither kind fits all.
        if reducer is not None and are_sums != are_means:
            kinds[reducer] = are_sums
    return kinds


def sums_among_numbers(runs: Runs) -> IsSum:
    """Return which numbers of a step are sums over the samples, and which means, if need be by what is closer."""
    are_sums = {}
    for name in runs.whole.numbers:
        trial = runs.number(name)
        # A quotient is the same for the samples twice, and half of it lies half its size away.
        is_sum = (
            trial.error_of_sum < trial.error_of_mean and trial.error_of_doubled < trial.size / 4
        )
        if name.startswith((LOSS, ADDED_LOSS)):
            # A wrong sum would scale the loss: it has to be clear, not only closer.
            is_sum = is_sum and trial.is_sum(_CLEARLY * trial.size)
        # For 0 and NaN, sum and mean don't differ, and nothing is found.
        if abs(trial.error_of_sum - trial.error_of_mean) > 1e-6 * trial.size:
            are_sums[name] = bool(is_sum)
    return are_sums


def numbers_of_no_kind(dry_step: DryStep, runs: Runs) -> list[str]:
    """Return metrics and logs that get a number which is neither a mean nor a sum over the samples."""
    counts = Counter(name.rpartition(" ")[0] for name in runs.whole.numbers)
    titles = []
    for name in runs.whole.numbers:
        trial = runs.number(name)
        error = min(trial.error_of_mean, trial.error_of_sum)
        # A metric that gets two numbers may weight one by the other.
        is_weighted = name.startswith(METRIC) and counts[name.rpartition(" ")[0]] > 1
        title = dry_step.title_of(name)
        if title is not None and not is_weighted and error > trial.allowed(_CLEARLY):
            titles.append(title)
    return titles


def added_losses(dry_step: DryStep, runs: Runs) -> tuple[list[str], list[str]]:
    """Return the lines at which layers add losses that are sums over the samples, and others that aren't means."""
    lines_of_sums = []
    lines_of_others = []
    for position, tensor in enumerate(dry_step.losses):
        trial = runs.added_loss(position)
        allowed = trial.allowed(10 * runs.tolerance)
        line = where(tensor.op) or tensor.op.name
        if trial.error_of_mean > allowed and trial.is_sum(allowed):
            lines_of_sums.append(line)
        elif trial.error_of_mean > allowed:
            lines_of_others.append(line)
    return lines_of_sums, lines_of_others


@dataclass(frozen=True)
class Change:
    """A variable that the step changes by the samples, so that the ranks' values aren't those of one process."""

    name: str
    line: str  # line that changes it; "" if unknown
    is_sum: bool  # its increments are sums over the samples
    is_number: bool  # it is a number, or counts
    is_averaged: bool  # the ranks' increments are averaged; else each rank keeps its own
    is_by_gradients: bool  # it is set by what a tape has computed
    position: int  # position among the variables that the step changes


def changes(
    dry_step: DryStep, runs: Runs, named: dict[int, Any], averaged: set[int]
) -> list[Change]:
    """Return the ``named`` variables, by their handles' ``id``, that the step changes unlike one process."""
    unlike = []
    states = zip(dry_step.handles, dry_step.state())
    for position, (handle, before) in enumerate(states):
        if id(handle) not in named:
            continue
        is_averaged = id(handle) in averaged
        is_sum = False
        trial = runs.change(position, before)
        if trial is not None:
            size = norm(before.astype(np.float64))
            allowed = trial.allowed(10 * runs.tolerance, 1e-6 * size)
            errors = list(map(trial.distance, trial.parts))
            if is_averaged:
                errors = [trial.error_of_mean]
            # NaN counts as no change, since it isn't above the limit.
            if not max(errors) > allowed:
                continue
            is_sum = trial.is_sum(allowed)
        setters = setters_of(handle, dry_step.graph)
        lines = filter(None, map(where, setters))
        counts = not np.issubdtype(before.dtype, np.floating)
        change = Change(
            name=variable_name(named[id(handle)]),
            line=next(lines, ""),
            is_sum=is_sum,
            is_number=not before.shape or counts,
            is_averaged=is_averaged,
            is_by_gradients=any(map(is_of_gradients, setters)),
            position=position,
        )
        unlike.append(change)
    return unlike


def depends_on_order(change: Change, runs: Runs, reversed_run: StepResults) -> bool:
    """Return whether a variable has a different value when the samples come in the opposite order."""
    state = runs.whole.state[change.position]
    other_state = reversed_run.state[change.position]
    if state.shape != other_state.shape:
        return True
    return not np.allclose(state, other_state, rtol=_CLEARLY, atol=1e-6)


def _dense(gradients: Sequence) -> list[np.ndarray]:
    """Return gradients of one variable as arrays of one shape; of tables only the rows that any of them has."""
    if not isinstance(gradients[0], (tuple, list)):
        return list(map(_wide, gradients))
    # Only rows that some run has touched are made dense: whole tables may be huge.
    indices_of_runs = [np.asarray(indices) for _, indices in gradients]
    rows = np.unique(np.concatenate(indices_of_runs))
    arrays = []
    for (slices, _), indices in zip(gradients, indices_of_runs):
        array = _wide(slices)
        dense = np.zeros([len(rows), *array.shape[1:]], array.dtype)
        positions = np.searchsorted(rows, indices)
        # Unlike an assignment by indices, it counts rows that come several times.
        np.add.at(dense, positions, array)
        arrays.append(dense)
    return arrays


def _wide(gradient: Any) -> np.ndarray:
    """Return an array of at least 32 bits."""
    array = np.asarray(gradient)
    if array.dtype in (np.float32, np.float64):
        return array
    return array.astype(np.float32)
