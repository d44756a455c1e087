"""The first-step check: before a replicated model trains, each rank compares the gradient of a few samples with the
mean of the gradients of two uneven parts of them, weighted by their samples.

They are equal if the step is one that can be divided. ``rehearsal`` runs the step, ``findings`` compares what comes of
it, and ``whereabouts`` finds the lines. This file says which models are checked, with what, and what follows.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import tensorflow as tf

from npu_device._src import compat, environment
from npu_device._src.training import training_state
from npu_device._src.training.fit import findings, start, whereabouts
from npu_device._src.training.fit.rehearsal import NotChecked, Part, Rehearsal, random_state_kept
from npu_device._src.training.fit.share import run_of, shapes_of, units_of
from npu_device._src.training.fit.well_known import needs_no_check
from npu_device._src.training.world import World

if TYPE_CHECKING:
    from npu_device._src.training.fit.function import Function

_log = logging.getLogger("npu_device")
_SAMPLES = 5
_SHOWN = 3


class _Verdict(NamedTuple):
    """What one rank has found: text for the statement at the start, and of an error or a warning; "" without one."""

    statement: str
    error: str = ""
    warning: str = ""


def check(function: Function, batch: Any) -> str:
    """Check a model's train step before the first step, on all ranks; return what has been checked, for the statement.

    Args:
        function: the train function of the model; the model is built, and has the same variables on all ranks.
        batch: the first batch, of this rank if each has its own; without what ``divided`` adds to it.

    Raises:
        ValueError: on all ranks: the step gives another result on several ranks than on one process.
    """
    if environment.NPU_DEVICE_FIRST_STEP_CHECK.get() == "off":
        return "not checked: NPU_DEVICE_FIRST_STEP_CHECK=off"
    world = function.world
    found = [_Verdict(*one) for one in world.objects(tuple(_verdict(function, batch)), "first-step check")]
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
    """Raise an error that says what is divided, if a step can't be traced with this rank's ``share(batch)``, but with
    the whole batch. ``error`` is that of the trace with the share.
    """
    # The share first: what has been traced with the batch counts as built, and wouldn't be traced again.
    if _can_be_traced(function, spec, share) or not _can_be_traced(function, spec, lambda data: data):
        return
    rank = function.world.job.cluster.rank
    raise ValueError(f"rank {rank}: {_not_samples(batch, _last_line(error), function.world)}") from error


def _can_be_traced(function: Function, spec: Any, divide: Any) -> bool:
    try:
        start.build(function.model, function.kind, function.own_step, spec, divide)
    except Exception:
        return False
    return True


def _verdict(function: Function, batch: Any) -> _Verdict:
    if needs_no_check(function, batch):
        return _Verdict("needs no check: the layers, the loss and the step are Keras's own")
    try:
        if function.model.run_eagerly and function.is_scripts:
            raise NotChecked("the step runs eagerly (run_eagerly=True), and what it does in Python can't be undone")
        with random_state_kept(), compat.without_rewriting():
            return _examine(function, batch)
    except NotChecked as error:
        return _Verdict(f"not checked: {_last_line(error)}")
    except Exception as error:  # the user's step, which may rely on what a few samples don't have
        _log.debug("first-step check", exc_info=True)
        text = f"{type(error).__name__}: {_last_line(error)}"
        verdict = _Verdict(f"not checked: the step can't run on a few samples ({text})")
    try:
        with random_state_kept(), compat.without_rewriting():
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
    batch = tf.nest.map_structure(_without_optional, batch)
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
    before = [compat.value_of_handle(handle).numpy() for handle in rehearsal.handles]
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
        return _Verdict("", _not_samples(batch, _last_line(error), function.world))
    precision = _precision(function.model)
    with _moved(rehearsal.variables, precision):
        [moved] = rehearsal.run([whole])
    runs = findings.Runs(first, [second, moved], divided, [part.weight for part in parts], 100 * precision)
    return _judge(function, spec, rehearsal, runs, before, [whole, *parts])


def _examine_shares(function: Function, batch: Any, verdict: _Verdict) -> _Verdict:
    """Run a step that needs the size of its batch on two shares of one size. This shows what it keeps of its samples,
    such as those of a queue, but nothing about its gradients.

    What is averaged over the ranks may differ between the shares, but not with the order of the samples.
    """
    batch = tf.nest.map_structure(_without_optional, batch)
    total = int(units_of(batch))
    count = total // max(2, function.world.size)
    parts = [Part(run_of(batch, total, first, first + count), count, 2 * count, not first) for first in (0, count)]
    turned = [replace(part, data=tf.nest.map_structure(_turned, part.data)) for part in parts]
    spec = tf.nest.map_structure(lambda leaf: None if leaf is None else tf.type_spec_from_value(leaf), parts[0].data)
    rehearsal = Rehearsal(function, spec)
    before = [compat.value_of_handle(handle).numpy() for handle in rehearsal.handles]
    [first, second], [again, _], [other, _] = map(rehearsal.run, (parts, parts, turned))
    if not findings.repeats(first, again):
        return verdict

    def kept(one: findings.Outcome, handles: set[int]) -> list[findings.Change]:
        runs = findings.Runs(first, [again], [one], [1.0], 100 * _precision(function.model))
        some = {handle: variable for handle, variable in named.items() if handle in handles}
        return [change for change in findings.changes(rehearsal, runs, before, some, set()) if not change.is_number]

    named, averaged = _variables(function)
    found = kept(second, set(named) - averaged)
    found += [replace(one, is_averaged=True) for one in kept(second, averaged) if one in kept(other, averaged)]
    return _Verdict("", _kept(_title(function), found[0], function.world)) if found else verdict


def _turned(leaf: Any) -> Any:
    return tf.reverse(leaf, [0]) if leaf is not None and leaf.shape.rank else leaf


def _title(function: Function) -> str:
    return f"the train step of {function.model.name!r}"


def _judge(
    function: Function,
    spec: Any,
    rehearsal: Rehearsal,
    runs: findings.Runs,
    before: Sequence[np.ndarray],
    parts: Sequence[Part],
) -> _Verdict:
    world, title = function.world, _title(function)
    sums, mixing = findings.added_losses(rehearsal, runs)
    if sums:
        return _Verdict("", _summed(title, f"a loss that a layer adds: {sums[0]}", world))
    different = findings.differences(rehearsal, runs)
    line = whereabouts.clipping(rehearsal.gradients, rehearsal.step.reduced)
    summed = [difference for difference in different if difference.is_sum]
    if summed and line is None:
        return _Verdict("", _summed(title, f"the gradient of {_names(summed)}", world))
    changed = findings.changes(rehearsal, runs, before, *_variables(function))
    kept = [change for change in changed if not change.is_number]
    if kept:
        return _Verdict("", _kept(title, kept[0], world))
    warnings = [_counted(title, change, world) for change in changed]
    if line is not None:
        warnings.append(_clipped(title, line, world))
    elif different:
        place = _place(function, spec, parts)
        if place is None and mixing:
            place = f"a loss that a layer adds, {mixing[0]}"
        warnings.append(_meeting(title, different, place, parts, world))
    return _Verdict("checked, with a warning" if warnings else "checked", warning="\n".join(warnings))


def _place(function: Function, spec: Any, parts: Sequence[Part]) -> str | None:
    """Return where samples meet; None if it can't be found."""
    try:
        rehearsal = Rehearsal(function, spec, whereabouts.values_per_sample)
        [whole], divided = rehearsal.run(parts[:1]), rehearsal.run(parts[1:])
    except Exception:  # the check itself has been made
        return None
    rows = [part.units for part in parts[1:]]
    return whereabouts.where_samples_meet(rehearsal.chosen, whole.chosen, [part.chosen for part in divided], rows)


# What is compared.


def _without_optional(leaf: Any) -> Any:
    return None if isinstance(leaf, tf.experimental.Optional) else leaf  # Keras 3 has an empty one for None


def _spec(leaf: Any) -> Any:
    if leaf is None:
        return None
    spec = tf.type_spec_from_value(leaf)
    if not spec.shape.rank:
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
    reduced = [*(variable for metric in known.metrics for variable in metric.variables)]
    reduced += training_state.optimizer_state(model)
    others = {id(compat.handle_of(variable)) for variable in reduced}
    every = [*compat.variables_of(model), *training_state.loose_variables(model)]
    named = {id(compat.handle_of(variable)): variable for variable in every}
    averaged = {id(compat.handle_of(variable)) for variable in known.statistics}
    return {handle: variable for handle, variable in named.items() if handle not in others}, averaged


def _precision(model: Any) -> float:
    """Return how much rounding may change a value, relative."""
    kinds = {str(getattr(layer, "compute_dtype", "float32")) for layer in compat.layers_of(model)}
    if kinds & {"float16", "bfloat16"}:
        return 5e-4
    if tf.config.list_logical_devices("GPU") and tf.config.experimental.tensor_float_32_execution_enabled():
        return 5e-4
    return 1e-6


class _moved:
    """A context in which variables have values that differ by rounding from their own."""

    def __init__(self, variables: Sequence[Any], precision: float) -> None:
        self._variables = training_state.unique(variables)
        self._precision = precision

    def __enter__(self) -> None:
        self._values = [tf.convert_to_tensor(variable) for variable in self._variables]
        for variable, value in zip(self._variables, self._values):
            array = value.numpy()
            signs = np.where(np.arange(array.size).reshape(array.shape) % 2, 1.0, -1.0)
            variable.assign((array.astype(np.float64) * (1 + self._precision * signs)).astype(array.dtype))

    def __exit__(self, *_: Any) -> None:
        for variable, value in zip(self._variables, self._values):
            variable.assign(value)


# What is said.


def _names(different: Sequence[findings.Difference]) -> str:
    shown = ", ".join(difference.name for difference in different[:_SHOWN])
    return shown + (f" and {len(different) - _SHOWN} more" if len(different) > _SHOWN else "")


def _summed(title: str, what: str, world: World) -> str:
    return (
        f"{title} adds up what its samples give where a replicated model expects their mean: {what}.\nEach of the "
        f"{world.size} ranks has its share of the batch, so that the result would be {world.size} times too small.\n"
        "Likely cause: a loss with one value per sample, or their sum, is differentiated; a loss is divided by the "
        "size of the whole batch; or a regularizer multiplies samples with each other (tf.tensordot).\nWhat to do: "
        "take the mean over the samples, tf.reduce_mean(loss); for a sum, pass a loss object with reduction='sum' to "
        "compile, or keep it as an attribute of the model."
    )


def _kept(title: str, change: findings.Change, world: World) -> str:
    line = f"\nSet by: {change.line}" if change.line else ""
    if change.is_trained:
        how = "changes by the gradients of its samples, without an optimizer"
        remedy = "reduce the gradients first: gradients = npu.distribute.all_reduce(gradients)"
    elif change.is_sum:
        how = "adds up values of the samples"
        remedy = "add up over the ranks first: value = npu.distribute.all_reduce(value, 'sum')"
    else:
        how = "takes values of the samples, as a queue or a memory bank does"
        remedy = "give it those of all ranks: value = npu.distribute.all_gather(value) before it is set"
    kept = "the mean over the ranks" if change.is_averaged else "another value on each rank"
    return (
        f"{title} sets {change.name!r}: it {how}. On {world.size} ranks it would hold {kept}, not what one process "
        f"has.{line}\nWhat to do: {remedy}."
    )


def _counted(title: str, change: findings.Change, world: World) -> str:
    how = "averaged over the ranks" if change.is_averaged else "each rank's own"
    line = f" ({change.line})" if change.line else ""
    return (
        f"{title} changes {change.name!r} by its samples{line}. On {world.size} ranks this is {how}, not what one "
        "process has.\nWhat to do: count steps, not samples; or reduce what is added first, with "
        "npu.distribute.all_reduce."
    )


def _clipped(title: str, line: str, world: World) -> str:
    return (
        f"{title} clips or changes gradients before they are reduced over the {world.size} ranks: {line}\nEach rank "
        "does that with the gradients of its own samples, which gives another result than on one process.\nWhat to do: "
        "reduce them first, gradients = npu.distribute.all_reduce(gradients); or set clipnorm, global_clipnorm or "
        "clipvalue on the optimizer."
    )


def _meeting(
    title: str, different: Sequence[findings.Difference], place: str | None, parts: Sequence[Part], world: World
) -> str:
    head, tail = parts[1].units, parts[2].units
    seen = (
        f"Samples first meet in {place}"
        if place is not None
        else "No operation before the loss mixes samples: the loss isn't a mean over them, such as a mean over their "
        "valid steps, or a root or a quotient of sums"
    )
    return (
        f"{title} doesn't treat samples one by one: the gradient of {head + tail} samples isn't the mean of those of "
        f"{head} and {tail} of them. The largest difference is that of {different[0].name}, "
        f"{100 * different[0].size:.2g} %.\n{seen}.\nEach of the {world.size} ranks sees its share of the batch only, "
        "so that the result is another one than on one process.\nWhat to do: to compare or mix the samples of all "
        "ranks, gather them first: values = npu.distribute.all_gather(values). To leave out steps, use a mask, "
        "ignore_class or sample_weight instead of a loss function that divides by their number."
    )


def _not_samples(batch: Any, error: str, world: World) -> str:
    return (
        f"a replicated model divides a batch among the {world.size} ranks along the first axis of each tensor, but the "
        f"train step fails with a part of these:\n{shapes_of(batch)}\n  {error}\nLikely cause: the first axis isn't "
        "samples, as in pairs or graphs; or the model has a fixed batch size.\nWhat to do: put the samples first in "
        "each tensor; or let each rank read its own batches, and pass them as npu.distribute.divided(dataset)."
    )
