"""The first-step check: before a replicated model trains, each rank compares the gradient of a few samples with the
mean of the gradients of two uneven parts of them, weighted by their samples.

They are equal if the step is one that can be divided. ``rehearsal`` runs the step, and ``findings`` compares what comes
of it. This file says which models are checked, and with what: Keras's own layers, loss and step need no check.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import tensorflow as tf

from npu_device._src import compat, environment
from npu_device._src.training.fit import findings, start, xla
from npu_device._src.training.fit.rehearsal import NotChecked, Outcome, Part, Rehearsal
from npu_device._src.training.watching import training_state
from npu_device._src.world.share import lengths_of, run_of, units_of, without_optional

if TYPE_CHECKING:
    from npu_device._src.training.fit.function import Function

_log = logging.getLogger("npu_device")
_SAMPLES = 5


class _Verdict(NamedTuple):
    """What one rank has found: text for the statement at the start, and of an error or a warning; "" without one."""

    statement: str
    error: str = ""
    warning: str = ""


def check(function: Function, batch: Any) -> str:
    """Check the step of a built model on all ranks; return the line of the statement, or raise ValueError."""
    if environment.NPU_DEVICE_FIRST_STEP_CHECK.get() == "off":
        return "not checked: NPU_DEVICE_FIRST_STEP_CHECK=off"
    world = function.world
    if needs_no_check(function, batch):
        mine = _Verdict("needs no check: the layers, the loss and the step are Keras's own")
    else:
        before = training_state.random_states()  # a trace may draw seeds
        try:
            with compat.without_rewriting():
                mine = _verdict(function, batch)
        finally:
            training_state.set_random_states(before)
    found = [_Verdict(*one) for one in world.objects(tuple(mine), "first-step check")]
    wrong = [rank for rank, verdict in enumerate(found) if verdict.error]
    if wrong:
        names = ", ".join(world.job.cluster.name_of(world.group.ranks[rank]) for rank in wrong)
        where = "" if len(wrong) == world.size else f"\nFound on {names}."
        raise ValueError(
            f"rank {world.job.cluster.rank}: {found[wrong[0]].error}{where}\n"
            "(NPU_DEVICE_FIRST_STEP_CHECK=off leaves this check out.)"
        )
    warning = next((verdict.warning for verdict in found if verdict.warning), "")
    if warning and world.is_main:
        _log.warning("%s", warning)
    unchecked = [verdict.statement for verdict in found if verdict.statement.startswith("not checked")]
    return unchecked[0] if unchecked else found[0].statement


def require_divisible(function: Function, spec: Any, share: Any, batch: Any, error: Exception) -> None:
    """Raise an error that says what is divided, if a step can be traced with the batch, but not with a share of it."""
    # The share first: what has been traced with the batch counts as built, and wouldn't be traced again.
    if _can_be_traced(function, spec, share) or not _can_be_traced(function, spec, lambda data: data):
        return
    rank = function.world.job.cluster.rank
    raise ValueError(f"rank {rank}: {findings.not_samples(batch, _last_line(error), function.world)}") from error


def _can_be_traced(function: Function, spec: Any, divide: Any) -> bool:
    try:
        start.build(function.model, function.kind, function.own_step, spec, divide)
    except Exception:
        return False
    return True


def _verdict(function: Function, batch: Any) -> _Verdict:
    try:
        if function.model.run_eagerly and function.is_scripts:
            raise NotChecked("the step runs eagerly (run_eagerly=True), and what it does in Python can't be undone")
        return _examine(function, batch)
    except NotChecked as error:
        return _Verdict(f"not checked: {_last_line(error)}")
    except Exception as error:  # the user's step, which may rely on what a few samples don't have
        _log.debug("first-step check", exc_info=True)
        text = f"{type(error).__name__}: {_last_line(error)}"
        verdict = _Verdict(f"not checked: the step can't run on a few samples ({text})")
    try:
        return _examine_shares(function, batch, verdict)
    except Exception:
        _log.debug("first-step check of shares", exc_info=True)
        return verdict


def _last_line(error: BaseException) -> str:
    """Return what an error says, without the user's lines that AutoGraph and TensorFlow put around it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or ["no message"]
    nodes = [place for place, line in enumerate(lines) if "{{node" in line]
    if isinstance(error, tf.errors.OpError) and nodes and nodes[-1]:
        return lines[nodes[-1] - 1][:200]
    users = [line for line in lines if line.startswith(f"{type(error).__name__}: ")]
    line = users[-1] if users else lines[0]
    return line.split(f"{type(error).__name__}: ")[-1][:200]


def _examine(function: Function, batch: Any) -> _Verdict:
    batch = without_optional(batch)
    total = int(units_of(batch))
    count = min(total, _SAMPLES)
    if count < 2:
        raise NotChecked("the first batch has one sample")
    split = 1 if count == 2 else count // 2 + 1
    whole = Part(run_of(batch, total, 0, count), count, count, True)
    parts = [
        Part(run_of(batch, total, 0, split), split, count, True),
        Part(run_of(batch, total, split, count), count - split, count, False),
    ]
    spec = tf.nest.map_structure(_spec, batch)
    rehearsal = Rehearsal(function, spec)
    if not rehearsal.variables and not rehearsal.handles:
        raise NotChecked("the step trains nothing")
    before = rehearsal.values()
    [first] = rehearsal.run([whole])
    [second] = rehearsal.run([whole])
    if not findings.repeats(first, second):
        raise NotChecked("the step gives other gradients for the same samples each time")
    if not findings.is_finite(first):
        raise NotChecked("the gradients of the first samples are 0 or not finite")
    try:
        divided = rehearsal.run(parts)
    except tf.errors.OpError as error:
        if count < total:
            raise
        return _Verdict("", findings.not_samples(batch, _last_line(error), function.world))
    precision = _precision(function.model)
    with _moved(rehearsal.variables, precision):
        [moved] = rehearsal.run([whole])
    runs = findings.Runs(before, first, [second, moved], divided, [part.weight for part in parts], 100 * precision)
    return _judge(function, spec, rehearsal, runs, [whole, *parts])


def _examine_shares(function: Function, batch: Any, verdict: _Verdict) -> _Verdict:
    """Run a step that needs its batch's size on two shares of one size, which shows what it keeps of its samples."""
    batch = without_optional(batch)
    total = int(units_of(batch))
    count = total // max(2, function.world.size)
    parts = [Part(run_of(batch, total, first, first + count), count, 2 * count, not first) for first in (0, count)]

    def turned(leaf: Any) -> Any:
        return tf.reverse(leaf, [0]) if leaf is not None and leaf.shape.rank else leaf

    others = [replace(part, data=tf.nest.map_structure(turned, part.data)) for part in parts]
    rehearsal = Rehearsal(function, start.spec_of(function.model, None, parts[0].data))
    before = rehearsal.values()
    [first, second], [again, _], [other, _] = map(rehearsal.run, (parts, parts, others))
    if not findings.repeats(first, again):
        return verdict

    def kept(one: Outcome, handles: set[int]) -> list[findings.Change]:
        runs = findings.Runs(before, first, [again], [one], [1.0], 100 * _precision(function.model))
        some = {handle: variable for handle, variable in named.items() if handle in handles}
        return [change for change in findings.changes(rehearsal, runs, some, set()) if not change.is_number]

    named, averaged = _variables(function)
    found = kept(second, set(named) - averaged)
    # What is averaged over the ranks may differ between the shares, but not with the order of the samples.
    found += [replace(one, is_averaged=True) for one in kept(second, averaged) if one in kept(other, averaged)]
    title = f"the train step of {function.model.name!r}"
    return _Verdict("", findings.kept(title, found[0], function.world)) if found else verdict


def _judge(function: Function, spec: Any, rehearsal: Rehearsal, runs: findings.Runs, parts: Sequence[Part]) -> _Verdict:
    world, title = function.world, f"the train step of {function.model.name!r}"
    sums, mixing = findings.added_losses(rehearsal, runs)
    if sums:
        return _Verdict("", findings.summed(title, f"a loss that a layer adds: {sums[0]}", world))
    different = findings.differences(rehearsal, runs)
    line = findings.clipping(rehearsal.gradients, rehearsal.step.reduced)
    summed = [difference for difference in different if difference.is_sum]
    if summed and line is None:
        return _Verdict("", findings.summed(title, f"the gradient of {findings.names(summed)}", world))
    changed = findings.changes(rehearsal, runs, *_variables(function))
    kept = [change for change in changed if not change.is_number]
    if kept:
        return _Verdict("", findings.kept(title, kept[0], world))
    warnings = [findings.counted(title, change, world) for change in changed]
    if line is not None:
        warnings.append(findings.clipped(title, line, world))
    elif different:
        place = _place(function, spec, parts)
        if place is None and mixing:
            place = f"a loss that a layer adds, {mixing[0]}"
        warnings.append(findings.meeting(title, different, place, parts, world))
    return _Verdict("checked, with a warning" if warnings else "checked", warning="\n".join(warnings))


def _place(function: Function, spec: Any, parts: Sequence[Part]) -> str | None:
    """Return where samples meet; None if it can't be found."""
    try:
        rehearsal = Rehearsal(function, spec, findings.values_per_sample)
        [whole], divided = rehearsal.run(parts[:1]), rehearsal.run(parts[1:])
    except Exception:  # the check itself has been made
        return None
    chosen, rows = [part.chosen for part in divided], [part.units for part in parts[1:]]
    return findings.where_samples_meet(rehearsal.chosen, whole.chosen, chosen, rows)


# What is compared.


def _spec(leaf: Any) -> Any:
    spec = None if leaf is None else tf.type_spec_from_value(leaf)
    if spec is None or not spec.shape.rank:
        return spec
    shape = [None, *spec.shape[1:]]
    if isinstance(spec, tf.SparseTensorSpec):
        return tf.SparseTensorSpec(shape, spec.dtype)
    if isinstance(spec, tf.RaggedTensorSpec):
        return tf.RaggedTensorSpec(shape, spec.dtype, spec.ragged_rank, spec.row_splits_dtype)
    return tf.TensorSpec(shape, spec.dtype)


def _variables(function: Function) -> tuple[dict[int, Any], set[int]]:
    """Return the variables that a step may change only as one process does, and those that are averaged; by handle."""
    model, known = function.model, function.parts
    reduced = [variable for metric in known.metrics for variable in metric.variables]
    others = {id(compat.handle_of(each)) for each in [*reduced, *training_state.optimizer_state(model)]}
    every = [*compat.variables_of(model), *training_state.loose_variables(model)]
    named = {id(compat.handle_of(variable)): variable for variable in every}
    averaged = {id(compat.handle_of(variable)) for variable in known.statistics}
    return {handle: variable for handle, variable in named.items() if handle not in others}, averaged


def _precision(model: Any) -> float:
    """Return how much rounding may change a value, relative."""
    kinds = {str(getattr(layer, "compute_dtype", "float32")) for layer in compat.all_layers(model)[1:]}
    has_gpu = bool(tf.config.list_logical_devices("GPU"))
    is_tf32 = has_gpu and tf.config.experimental.tensor_float_32_execution_enabled()
    return 5e-4 if is_tf32 or kinds & {"float16", "bfloat16"} else 1e-6


@contextlib.contextmanager
def _moved(variables: Sequence[Any], precision: float) -> Iterator[None]:
    """Give variables values that differ by rounding from their own in the block."""
    before = [(variable, tf.convert_to_tensor(variable)) for variable in training_state.unique(variables)]
    for variable, value in before:
        array = value.numpy()
        signs = np.where(np.arange(array.size).reshape(array.shape) % 2, 1.0, -1.0)
        variable.assign((array.astype(np.float64) * (1 + precision * signs)).astype(array.dtype))
    try:
        yield
    finally:
        for variable, value in before:
            variable.assign(value)


_LOSSES = {
    "binarycrossentropy", "binaryfocalcrossentropy", "categoricalcrossentropy", "categoricalfocalcrossentropy",
    "categoricalhinge", "cosinesimilarity", "hinge", "huber", "kldivergence", "logcosh", "meanabsoluteerror",
    "meanabsolutepercentageerror", "meansquarederror", "meansquaredlogarithmicerror", "poisson",
    "sparsecategoricalcrossentropy", "squaredhinge",
}  # fmt: skip
"""Those that have one value for each sample. Dice, Tversky and CircleLoss, for instance, compare the samples."""

_ANYTHING = (*xla.LAYERS_OF_SCRIPTS, "AddLoss")  # Keras's layers that hold anything that the user has written


def needs_no_check(function: Function, batch: Any) -> bool:
    """Return True for a functional model of Keras's own layers with a built-in loss and dense inputs of one length."""
    losses = function.parts.losses
    return (
        not function.is_scripts
        and compat.belongs_to_keras(type(function.model))
        and bool(losses)
        and all(map(_is_well_known_loss, losses))
        and all(map(_treats_samples_apart, compat.operations_of(function.model)))
        and len({int(length) for length in lengths_of(batch)}) == 1
        and not any(isinstance(leaf, tf.RaggedTensor) for leaf in tf.nest.flatten(batch))
    )


def _is_well_known_loss(loss: Any) -> bool:
    function = getattr(loss, "fn", None)
    thing = type(loss) if function is None else function
    name = getattr(thing, "__name__", "").lower().replace("_", "")
    return compat.belongs_to_keras(type(loss)) and compat.belongs_to_keras(thing) and name in _LOSSES


def _treats_samples_apart(layer: Any) -> bool:
    axis = getattr(layer, "axis", None)
    axes = axis if isinstance(axis, (list, tuple)) else [axis]
    activation = getattr(layer, "activation", None)
    return (
        compat.is_layer(layer)
        and compat.belongs_to_keras(type(layer))
        and type(layer).__name__ not in _ANYTHING
        and 0 not in axes
        and (activation is None or compat.belongs_to_keras(activation))
        and getattr(layer, "activity_regularizer", None) is None
    )
