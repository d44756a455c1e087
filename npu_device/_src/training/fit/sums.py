"""Runs a step on some samples and on parts of them, as often as it takes to know which of its numbers are sums over the
samples: losses, gradients, and what it gives to metrics and logs.

A replicated model takes all of them for means, and weights them by samples. Sums add up over the ranks instead.
"""

from __future__ import annotations

import contextlib
import logging
from collections import ChainMap
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from npu_device._src import compat
from npu_device._src.training.fit import findings
from npu_device._src.training.fit.different_samples import different_samples
from npu_device._src.training.fit.dry_step import DryStep, NotChecked, Part, StepResults
from npu_device._src.training.fit.findings import Runs
from npu_device._src.training.fit.first_step_texts import last_line, not_samples
from npu_device._src.training.fit.graph_lines import where
from npu_device._src.training.fit.losses import ADDED_LOSS, LOSS
from npu_device._src.training.fit.step_context import StepContext
from npu_device._src.training.watching import training_state
from npu_device._src.training.watching.partial_sums import with_values
from npu_device._src.training.watching.wrapped_optimizers import reducer_of, reducing_optimizer
from npu_device._src.world.current_step import IsSum, Sums
from npu_device._src.world.share import run_of, spec_of_any_length, units_at, units_of

_log = logging.getLogger("npu_device")
_SAMPLES = 5


class Indivisible(Exception):
    """The step can't be divided; the text is that of the error."""


class Samples(NamedTuple):
    """Some samples of a batch, two parts of them, and all of them twice."""

    spec: Any  # spec with which the step is traced
    whole: Part
    parts: list[Part]
    doubled: Part
    positions: list[int]  # positions of the samples in the batch
    total: int  # samples of the whole batch


class CheckedStep(NamedTuple):
    """A step that ran on samples and on their parts."""

    dry_step: DryStep
    runs: Runs
    sums: IsSum


def set_sums(context: StepContext, sums_of_ranks: Sequence[IsSum]) -> None:
    """Take numbers for sums or means of which the ranks have found this; if they differ, as the first of them has."""
    # The first rank that has found a number decides.
    numbers = dict(ChainMap(*sums_of_ranks))
    reducers = _reducers(context)
    adding = {reducer for name, reducer in reducers.items() if numbers.get(name)}
    has_all_reducers = bool(adding) and adding == set(reducers.values())
    context.sums = Sums(numbers, adding, has_all_reducers)


def _reducers(context: StepContext) -> dict[str, Any]:
    """Return the reducers of the optimizers of a model, with names that are the same on all ranks."""
    optimizers = map(reducing_optimizer, training_state.optimizers(context.model))
    named = {}
    for position, reducer in enumerate(map(reducer_of, optimizers)):
        if reducer is not None:
            named[f"optimizer {position}"] = reducer
    return named


def samples_of(batch: Any) -> Samples:
    """Return some samples of a batch that differ, and two uneven parts of them."""
    total = int(units_of(batch))
    if total < 2:
        raise NotChecked("the first batch has one sample")
    positions = different_samples(batch, total, min(total, _SAMPLES))
    count = len(positions)
    # The parts are uneven (of two samples, one each), since means of even parts could hide a sum that isn't weighted.
    split = min(count // 2 + 1, count - 1)
    chosen = units_at(batch, total, positions)
    whole = Part(chosen, count, count, True)
    parts = parts_of(chosen, count, split)
    doubled = Part(units_at(batch, total, positions * 2), 2 * count, 2 * count, True)
    spec = tf.nest.map_structure(spec_of_any_length, batch)
    return Samples(spec, whole, parts, doubled, positions, total)


def parts_of(batch: Any, count: int, split: int) -> list[Part]:
    """Return a batch of a number of units as two parts, the second of which begins at ``split``."""
    head = run_of(batch, count, 0, split)
    tail = run_of(batch, count, split, count)
    return [Part(head, split, count, True), Part(tail, count - split, count, False)]


def checked_step(context: StepContext, samples: Samples, has_repeats: bool) -> CheckedStep:
    """Run a step on samples and on their parts, until what are sums over the samples is known, and added up.

    With repeats, the gradients must be the same twice, and what rounding changes is measured.
    """
    added_names = set[str]()
    while True:
        added = dict.fromkeys(added_names, True)
        # The added numbers change what the step computes, and so it is traced anew.
        set_sums(context, [added])
        dry_step = DryStep(context, samples.spec)
        runs = _runs(context, dry_step, samples, has_repeats)
        numbers = findings.sums_among_numbers(runs)
        sums = {name for name, is_sum in numbers.items() if is_sum}
        losses = {name for name in sums if name.startswith((LOSS, ADDED_LOSS))}
        # Losses come first, since the penalties beside them are no sums.
        if not losses <= added_names:
            added_names |= losses
            continue
        # Once an optimizer sums, its gradients count as they are, and the others may look different. So all are
        # compared again.
        gradients = findings.compared_gradients(dry_step, runs)
        are_sums = findings.sums_of_optimizers(gradients)
        optimizers = {
            name: are_sums[reducer]
            for name, reducer in _reducers(context).items()
            if reducer in are_sums
        }
        adding = {name for name, is_sum in optimizers.items() if is_sum}
        if adding <= added_names:
            return CheckedStep(dry_step, runs, {**numbers, **optimizers, **added})
        added_names |= adding


def _runs(context: StepContext, dry_step: DryStep, samples: Samples, has_repeats: bool) -> Runs:
    """Run a step on samples, with repeats or none, on their parts, and on the samples twice."""
    precision = precision_of(context.model)
    [whole] = dry_step.run([samples.whole])
    repeats = []
    if has_repeats:
        if not dry_step.variables and not dry_step.handles:
            raise NotChecked("the step trains nothing")
        if not findings.are_comparable(whole):
            raise NotChecked("the gradients of the first samples are 0 or not finite")
        repeats += dry_step.run([samples.whole])
        if not findings.are_repeatable(whole, repeats[0]):
            raise NotChecked("the step gives other gradients for the same samples each time")
    try:
        parts = dry_step.run(samples.parts)
    except tf.errors.OpError as error:
        # A failure says nothing if the step may only need more samples than were chosen.
        if len(samples.positions) < samples.total:
            raise
        text = not_samples(context, samples.whole.data, last_line(error))
        raise Indivisible(text) from error
    if has_repeats:
        with _moved(dry_step.variables, precision):
            repeats += dry_step.run([samples.whole])
    doubled: list[StepResults] = []
    # A step may need samples that differ.
    with contextlib.suppress(tf.errors.OpError):
        doubled = dry_step.run([samples.doubled])
    weights = [float(part.fraction) for part in samples.parts]
    return Runs(whole, repeats, parts, weights, 100 * precision, doubled)


def sums_in_words(context: StepContext, checked: CheckedStep) -> str:
    """Return what of the step's losses and gradients is a sum over the samples, in words; "" for nothing."""
    texts = []
    for name in [name for name, is_sum in checked.sums.items() if is_sum]:
        taker, _, position = name.partition(" ")
        if name.startswith(LOSS):
            loss = context.objects.losses[int(position.split()[0])]
            texts.append(f"the loss {getattr(loss, 'name', None) or type(loss).__name__}")
        elif name.startswith(ADDED_LOSS):
            line = where(checked.dry_step.numbers[name].op)
            location = f" ({line})" * bool(line)
            texts.append(f"a loss that a layer adds{location}")
        elif taker == "optimizer":
            optimizer = training_state.optimizers(context.model)[int(position)]
            texts.append(f"the gradients of {type(optimizer).__name__}")
    return ", ".join(dict.fromkeys(texts))


def precision_of(model: Any) -> float:
    """Return how much rounding may change a value, relative."""
    # The model itself has the policy of its layers, or none.
    layers = compat.all_layers(model)[1:]
    dtypes = {str(getattr(layer, "compute_dtype", "float32")) for layer in layers}
    has_gpu = bool(tf.config.list_logical_devices("GPU"))
    is_tf32 = has_gpu and tf.config.experimental.tensor_float_32_execution_enabled()
    if is_tf32 or dtypes & {"float16", "bfloat16"}:
        return 5e-4
    return 1e-6


def _moved(variables: Sequence, precision: float) -> contextlib.AbstractContextManager[None]:
    """Give variables values that differ by rounding from their own in the block."""
    # Moved once, although an optimizer may have been given a variable twice.
    moved = compat.unique(variables)
    moved_arrays = []
    for variable in moved:
        array = tf.convert_to_tensor(variable).numpy()
        # Numbers move up and down in turns, as rounding does.
        positions = np.arange(array.size).reshape(array.shape)
        factors = 1 + precision * np.where(positions % 2, 1.0, -1.0)
        moved_array = array.astype(np.float64) * factors
        moved_arrays.append(moved_array.astype(array.dtype))
    return with_values(moved, moved_arrays)
