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
from typing import Any, NamedTuple

import tensorflow as tf

from npu_device._src import compat, environment
from npu_device._src.training.fit import findings, start, xla
from npu_device._src.training.fit.rehearsal import NotChecked, Outcome, Part, Rehearsal
from npu_device._src.training.fit.step_context import StepContext
from npu_device._src.training.fit.sums import (
    Compared,
    Indivisible,
    Samples,
    added_up,
    compared,
    precision_of,
    samples_of,
    set_sums,
)
from npu_device._src.training.watching import training_state
from npu_device._src.world.share import lengths_of, run_of, units_of, without_optional

_log = logging.getLogger("npu_device")
_SAMPLES = 5


class _Verdict(NamedTuple):
    """What one rank has found: text for the statement at the start, and of an error or a warning; "" without one."""

    statement: str
    error: str = ""
    warning: str = ""
    sums: dict[str, bool] = {}  # noqa: RUF012  # see ``Sums.numbers``; and for each optimizer, by its place
    added: str = ""  # what of the gradients is added up, in words


def check(context: StepContext, batch: Any) -> str:
    """Check the step of a built model on all ranks; return the line of the statement, or raise ValueError."""
    if environment.NPU_DEVICE_FIRST_STEP_CHECK.get() == "off":
        return "not checked: NPU_DEVICE_FIRST_STEP_CHECK=off"
    world = context.world
    if needs_no_check(context, batch):
        mine = _Verdict(
            "not compared: layers, loss, step and optimizer are Keras's own, which treat samples one by one"
        )
    else:
        with _nothing_drawn():
            mine = _verdict(context, batch)
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
    set_sums(context, [verdict.sums for verdict in found])
    unchecked = [
        verdict.statement for verdict in found if verdict.statement.startswith("not checked")
    ]
    statement = unchecked[0] if unchecked else found[0].statement
    added = next((verdict.added for verdict in found if verdict.added), "")
    return f"{statement}\n  sums           {added}: the ranks add up" if added else statement


def look_for_sums(context: StepContext, batch: Any) -> str:
    """Find out on all ranks which numbers of a test step are sums over the samples; return what to remember."""
    sums: dict[str, bool] = {}
    is_off = environment.NPU_DEVICE_FIRST_STEP_CHECK.get() == "off"
    if not is_off and not needs_no_check(context, batch) and not context.model.run_eagerly:
        try:
            with _nothing_drawn():
                samples = samples_of(without_optional(batch))
                sums = compared(context, samples, repeats=False).sums
        except Exception:  # the user's step, which may rely on what a few samples don't have
            _log.debug("sums of a test step", exc_info=True)
    if not is_off:
        set_sums(context, context.world.objects(sums, "sums of a test step"))
    return "looked at"


@contextlib.contextmanager
def _nothing_drawn() -> Iterator[None]:
    before = training_state.random_states()  # a trace may draw seeds
    try:
        with compat.without_rewriting():
            yield
    finally:
        training_state.set_random_states(before)


def require_divisible(
    context: StepContext, spec: Any, share: Any, batch: Any, error: Exception
) -> None:
    """Raise an error that says what is divided, if a step can be traced with the batch, but not with a share of it."""
    # The share first: what has been traced with the batch counts as built, and wouldn't be traced again.
    if _can_be_traced(context, spec, share) or not _can_be_traced(context, spec, lambda data: data):
        return
    rank = context.world.job.cluster.rank
    raise ValueError(
        f"rank {rank}: {findings.not_samples(batch, findings.last_line(error), context.world)}"
    ) from error


def _can_be_traced(context: StepContext, spec: Any, divide: Any) -> bool:
    try:
        start.build(context.model, context.kind, context.own_step, spec, divide)
    except Exception:
        return False
    return True


def _verdict(context: StepContext, batch: Any) -> _Verdict:
    try:
        if context.model.run_eagerly and context.is_from_script:
            raise NotChecked(
                "the step runs eagerly (run_eagerly=True), and what it does in Python can't be undone"
            )
        return _examine(context, batch)
    except NotChecked as error:
        return _Verdict(f"not checked: {findings.last_line(error)}")
    except Indivisible as error:
        return _Verdict("", str(error))
    except Exception as error:  # the user's step, which may rely on what a few samples don't have
        _log.debug("first-step check", exc_info=True)
        text = f"{type(error).__name__}: {findings.last_line(error)}"
        verdict = _Verdict(f"not checked: the step can't run on a few samples ({text})")
    try:
        return _examine_shares(context, batch, verdict)
    except Exception:
        _log.debug("first-step check of shares", exc_info=True)
        return verdict


def _examine(context: StepContext, batch: Any) -> _Verdict:
    batch = without_optional(batch)
    samples = samples_of(batch)
    found = compared(context, samples, repeats=True)
    return _judge(context, samples, found)._replace(sums=found.sums, added=added_up(context, found))


def _examine_shares(context: StepContext, batch: Any, verdict: _Verdict) -> _Verdict:
    """Run a step that needs its batch's size on two shares of one size, which shows what it keeps of its samples."""
    batch = without_optional(batch)
    total = int(units_of(batch))
    count = total // max(2, context.world.size)
    parts = [
        Part(run_of(batch, total, first, first + count), count, 2 * count, not first)
        for first in (0, count)
    ]
    others = list(map(_turned, parts))
    rehearsal = Rehearsal(context, start.spec_of(context.model, None, parts[0].data))
    before = rehearsal.values()
    [first, second], [again, _], [other, _] = map(rehearsal.run, (parts, parts, others))
    if not findings.repeats(first, again):
        return verdict

    def kept(one: Outcome, handles: set[int]) -> list[findings.Change]:
        runs = findings.Runs(
            before, first, [again], [one], [1.0], 100 * precision_of(context.model)
        )
        some = {handle: variable for handle, variable in named.items() if handle in handles}
        return [
            change
            for change in findings.changes(rehearsal, runs, some, set())
            if not change.is_number
        ]

    named, averaged = _variables(context)
    in_order = {change.name for change in kept(other, set(named))}
    found = [
        replace(change, is_in_order=change.name in in_order)
        for change in kept(second, set(named) - averaged)
    ]
    # What is averaged over the ranks may differ between the shares, but not with the order of the samples.
    found += [
        replace(one, is_averaged=True)
        for one in kept(second, averaged)
        if one in kept(other, averaged)
    ]
    title = f"the train step of {context.model.name!r}"
    return _Verdict("", findings.kept(title, found[0], context.world)) if found else verdict


def _turned(part: Part) -> Part:
    """Return a part of a batch with its samples in the opposite order."""

    def turned(leaf: Any) -> Any:
        if leaf is None or not leaf.shape.rank or isinstance(leaf, tf.SparseTensor):
            return leaf
        return leaf[::-1] if isinstance(leaf, tf.RaggedTensor) else tf.reverse(leaf, [0])

    return replace(part, data=tf.nest.map_structure(turned, part.data))


def _judge(context: StepContext, samples: Samples, found: Compared) -> _Verdict:
    world, title = context.world, f"the train step of {context.model.name!r}"
    rehearsal, runs, parts = found.rehearsal, found.runs, [samples.whole, *samples.parts]
    sums, mixing = findings.added_losses(rehearsal, runs)
    if sums:
        return _Verdict("", findings.summed(title, sums[0], world))
    gradients = findings.comparisons(rehearsal, runs)
    different = [comparison for comparison in gradients if not comparison.is_mean]
    line = findings.clipping(rehearsal.gradients, rehearsal.step.reduced)
    if any(comparison.is_sum for comparison in different) and line is None:
        return _Verdict("", findings.of_two_kinds(title, gradients, world))
    changed = findings.changes(rehearsal, runs, *_variables(context))
    kept = [change for change in changed if not change.is_number]
    if kept:
        [turned] = rehearsal.run([_turned(samples.whole)])
        in_order = findings.depends_on_order(kept[0], runs, turned)
        return _Verdict("", findings.kept(title, replace(kept[0], is_in_order=in_order), world))
    warnings = [findings.counted(title, change, world) for change in changed]
    if line is not None:
        warnings.append(findings.clipped(title, line, world))
    elif different and (move := findings.moving(rehearsal)):
        warnings.append(findings.moved(title, move, world))
    elif different and _are_sums_with_more(samples, found):
        return _Verdict("", findings.beside_a_sum(title, different, world))
    elif different:
        place = _place(context, samples.spec, parts)
        if place is None and mixing:
            place = f"a loss that a layer adds, {mixing[0]}", False
        warnings.append(findings.meeting(title, different, place, parts, world))
    numbers = ", ".join(str(place + 1) for place in sorted(samples.places))
    sizes = " and ".join(str(part.units) for part in samples.parts)
    compared_with = (
        f"gradients, added losses and variables of samples {numbers} of {samples.total}, "
        f"with those of {sizes}"
    )
    result = "checked, with a warning" if warnings else "checked"
    return _Verdict(f"{result}: {compared_with} of them", warning="\n".join(warnings))


def _are_sums_with_more(samples: Samples, found: Compared) -> bool:
    count = samples.whole.units
    if count < 3 or found.rehearsal.step.sums.reductions:
        return False
    cut = [run_of(samples.whole.data, count, 0, 1), run_of(samples.whole.data, count, 1, count)]
    others = [Part(cut[0], 1, count, True), Part(cut[1], count - 1, count, False)]
    weights = [part.weight for part in others]
    return findings.are_sums_with_more(found.runs, found.rehearsal.run(others), weights)


def _place(context: StepContext, spec: Any, parts: Sequence[Part]) -> tuple[str, bool] | None:
    """Return where samples meet, and if that is a value of a sample; None if it can't be found."""
    try:
        rehearsal = Rehearsal(context, spec, findings.values_of_samples)
        [whole], divided = rehearsal.run(parts[:1]), rehearsal.run(parts[1:])
    except Exception:  # the check itself has been made
        return None
    chosen, rows = [part.chosen for part in divided], [part.units for part in parts[1:]]
    return findings.where_samples_meet(rehearsal.chosen, whole.chosen, chosen, rows)


def _variables(context: StepContext) -> tuple[dict[int, Any], set[int]]:
    """Return the variables that a step may change only as one process does, and those that are averaged; by handle."""
    model, known = context.model, context.parts
    reduced = [variable for metric in known.metrics for variable in metric.variables]
    others = {
        id(compat.handle_of(each)) for each in [*reduced, *training_state.optimizer_state(model)]
    }
    every = [
        *training_state.common(model, compat.variables_of(model)),
        *training_state.loose_variables(model),
    ]
    named = {id(compat.handle_of(variable)): variable for variable in every}
    averaged = {id(compat.handle_of(variable)) for variable in known.statistics}
    return {
        handle: variable for handle, variable in named.items() if handle not in others
    }, averaged


_LOSSES = {
    "binarycrossentropy", "binaryfocalcrossentropy", "categoricalcrossentropy", "categoricalfocalcrossentropy",
    "categoricalhinge", "cosinesimilarity", "hinge", "huber", "kldivergence", "logcosh", "meanabsoluteerror",
    "meanabsolutepercentageerror", "meansquarederror", "meansquaredlogarithmicerror", "poisson",
    "sparsecategoricalcrossentropy", "squaredhinge",
}  # fmt: skip
"""Those that have one value for each sample. Dice, Tversky and CircleLoss, for instance, compare the samples."""

_ANYTHING = (
    *xla.LAYERS_OF_SCRIPTS,
    "AddLoss",
)  # Keras's layers that hold anything that the user has written


def needs_no_check(context: StepContext, batch: Any) -> bool:
    """Return True for a functional model of Keras's own layers with a built-in loss and dense inputs of one length."""
    losses = context.parts.losses
    return (
        not context.is_from_script
        and compat.belongs_to_keras(type(context.model))
        and bool(losses)
        and all(map(compat.reduces_first, training_state.optimizers(context.model)))
        and all(map(_is_well_known_loss, losses))
        and all(map(_treats_samples_apart, compat.operations_of(context.model)))
        and len({int(length) for length in lengths_of(batch)}) == 1
        and not any(isinstance(leaf, tf.RaggedTensor) for leaf in tf.nest.flatten(batch))
    )


def _is_well_known_loss(loss: Any) -> bool:
    function = getattr(loss, "fn", None)
    thing = type(loss) if function is None else function
    name = getattr(thing, "__name__", "").lower().replace("_", "")
    return (
        compat.belongs_to_keras(type(loss)) and compat.belongs_to_keras(thing) and name in _LOSSES
    )


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
