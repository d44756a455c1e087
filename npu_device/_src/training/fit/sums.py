"""Runs a step on some samples and on parts of them, as often as it takes to know which of its numbers are sums over the
samples: losses, gradients, and what it gives to metrics and logs.

A replicated model takes all of them for means, and weights them by samples. Sums add up over the ranks instead.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from npu_device._src import compat
from npu_device._src.training.fit import findings
from npu_device._src.training.fit.different_samples import different_samples
from npu_device._src.training.fit.rehearsal import NotChecked, Part, Rehearsal
from npu_device._src.training.fit.step_context import StepContext
from npu_device._src.training.fit.weighting import ADDED_LOSS, LOSS
from npu_device._src.training.watching import training_state
from npu_device._src.training.watching.wrapped_optimizers import carrier, reduction_of
from npu_device._src.world.current_step import Sums
from npu_device._src.world.share import run_of, units_at, units_of

_log = logging.getLogger("npu_device")
_SAMPLES = 5


class Indivisible(Exception):
    """The step can't be divided; the text is that of the error."""


class Samples(NamedTuple):
    spec: Any  # with which the step is traced
    whole: Part
    parts: list[Part]
    places: list[int]  # in the batch
    total: int  # of the batch


class Compared(NamedTuple):
    rehearsal: Rehearsal
    runs: findings.Runs
    sums: dict[str, bool]  # of all numbers, and of all optimizers


def set_sums(context: StepContext, found: Sequence[dict[str, bool]]) -> None:
    """Take numbers for sums or means of which the ranks have found this; if they differ, as the first of them has."""
    context.sums = Sums()
    for sums in reversed(found):
        context.sums.numbers.update(sums)
    reductions = dict(_reductions(context))
    adding = {reduction for name, reduction in reductions.items() if context.sums.numbers.get(name)}
    context.sums.reductions = adding
    context.sums.are_all = bool(adding) and adding == set(reductions.values())


def _reductions(context: StepContext) -> list[tuple[str, Any]]:
    """Return the reductions of the optimizers of a model, with names that are the same on all ranks."""
    found = enumerate(map(reduction_of, map(carrier, training_state.optimizers(context.model))))
    return [
        (f"optimizer {place}", reduction) for place, reduction in found if reduction is not None
    ]


def samples_of(batch: Any) -> Samples:
    """Return some samples of a batch that differ, and two uneven parts of them."""
    total = int(units_of(batch))
    if total < 2:
        raise NotChecked("the first batch has one sample")
    places = different_samples(batch, total, min(total, _SAMPLES))
    count = len(places)
    split = 1 if count == 2 else count // 2 + 1
    chosen = units_at(batch, total, places)
    whole = Part(chosen, count, count, True)
    parts = [
        Part(run_of(chosen, count, 0, split), split, count, True),
        Part(run_of(chosen, count, split, count), count - split, count, False),
    ]
    return Samples(tf.nest.map_structure(spec_of_any_length, batch), whole, parts, places, total)


def compared(context: StepContext, samples: Samples, repeats: bool) -> Compared:
    """Run a step on samples and on their parts, until what are sums over the samples is known, and added up.

    With ``repeats`` the gradients must be the same twice, and it is seen what rounding changes.
    """
    known: set[str] = set()
    while True:
        set_sums(context, [dict.fromkeys(known, True)])
        rehearsal = Rehearsal(context, samples.spec)
        runs = _runs(context, rehearsal, samples, repeats)
        numbers = findings.kinds(runs)
        losses = {
            name
            for name, is_sum in numbers.items()
            if is_sum and name.startswith((LOSS, ADDED_LOSS))
        }
        if not losses <= known:  # first these: the penalties beside them are no sums
            known |= losses
            continue
        kinds = findings.adding(findings.comparisons(rehearsal, runs))
        optimizers = {
            name: kinds[reduction] for name, reduction in _reductions(context) if reduction in kinds
        }
        adding = {name for name, is_sum in optimizers.items() if is_sum}
        if adding <= known:
            return Compared(
                rehearsal, runs, {**numbers, **optimizers, **dict.fromkeys(known, True)}
            )
        known |= adding


def _runs(
    context: StepContext, rehearsal: Rehearsal, samples: Samples, repeats: bool
) -> findings.Runs:
    whole, parts = samples.whole, samples.parts
    precision = precision_of(context.model)
    before = rehearsal.values()
    [first] = rehearsal.run([whole])
    again = []
    if repeats:
        if not rehearsal.variables and not rehearsal.handles:
            raise NotChecked("the step trains nothing")
        again += rehearsal.run([whole])
        if not findings.repeats(first, again[0]):
            raise NotChecked("the step gives other gradients for the same samples each time")
        if not findings.is_finite(first):
            raise NotChecked("the gradients of the first samples are 0 or not finite")
    try:
        divided = rehearsal.run(parts)
    except tf.errors.OpError as error:
        if len(samples.places) < samples.total:
            raise
        raise Indivisible(
            findings.not_samples(whole.data, findings.last_line(error), context.world)
        ) from error
    if repeats:
        with _moved(rehearsal.variables, precision):
            again += rehearsal.run([whole])
    return findings.Runs(
        before, first, again, divided, [part.weight for part in parts], 100 * precision
    )


def added_up(context: StepContext, found: Compared) -> str:
    """Return what of the step's losses and gradients is a sum over the samples, in words; "" for nothing."""
    texts = []
    for name, is_sum in found.sums.items():
        kind, _, place = name.partition(" ")
        if is_sum and name.startswith(LOSS):
            loss = context.parts.losses[int(place.split()[0])]
            texts.append(f"the loss {getattr(loss, 'name', None) or type(loss).__name__}")
        elif is_sum and name.startswith(ADDED_LOSS):
            line = findings.where(found.rehearsal.numbers[name].op)
            texts.append(f"a loss that a layer adds{f' ({line})' if line else ''}")
        elif is_sum and kind == "optimizer":
            optimizer = training_state.optimizers(context.model)[int(place)]
            texts.append(f"the gradients of {type(optimizer).__name__}")
    return ", ".join(dict.fromkeys(texts))


def spec_of_any_length(leaf: Any) -> Any:
    spec = None if leaf is None else tf.type_spec_from_value(leaf)
    if spec is None or not spec.shape.rank:
        return spec
    shape = [None, *spec.shape[1:]]
    if isinstance(spec, tf.SparseTensorSpec):
        return tf.SparseTensorSpec(shape, spec.dtype)
    if isinstance(spec, tf.RaggedTensorSpec):
        return tf.RaggedTensorSpec(shape, spec.dtype, spec.ragged_rank, spec.row_splits_dtype)
    return tf.TensorSpec(shape, spec.dtype)


def precision_of(model: Any) -> float:
    """Return how much rounding may change a value, relative."""
    kinds = {
        str(getattr(layer, "compute_dtype", "float32")) for layer in compat.all_layers(model)[1:]
    }
    has_gpu = bool(tf.config.list_logical_devices("GPU"))
    is_tf32 = has_gpu and tf.config.experimental.tensor_float_32_execution_enabled()
    return 5e-4 if is_tf32 or kinds & {"float16", "bfloat16"} else 1e-6


@contextlib.contextmanager
def _moved(variables: Sequence[Any], precision: float) -> Iterator[None]:
    """Give variables values that differ by rounding from their own in the block."""
    before = [
        (variable, tf.convert_to_tensor(variable)) for variable in training_state.unique(variables)
    ]
    for variable, value in before:
        array = value.numpy()
        signs = np.where(np.arange(array.size).reshape(array.shape) % 2, 1.0, -1.0)
        variable.assign((array.astype(np.float64) * (1 + precision * signs)).astype(array.dtype))
    try:
        yield
    finally:
        for variable, value in before:
            variable.assign(value)
