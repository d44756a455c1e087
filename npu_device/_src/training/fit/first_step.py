"""The first-step check: before a replicated model trains, each rank compares the gradient of a few samples with the
mean of the gradients of two uneven parts of them, weighted by their samples.

They are equal if the step is one that can be divided. ``dry_step`` runs the step, ``sums`` tells sums from means in it,
``findings`` compares what comes of it, ``mixing`` looks for the lines to blame, and ``first_step_texts`` has what to
say. This file says which models are checked, and with what: Keras's own layers, loss and step need no check.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import tensorflow as tf

from npu_device._src import compat, environment
from npu_device._src.training.fit import findings, first_step_texts as texts, mixing, start, xla
from npu_device._src.training.fit.dry_step import DryStep, NotChecked, Part
from npu_device._src.training.fit.mixing import MixingPoint
from npu_device._src.training.fit.step_context import StepContext
from npu_device._src.training.fit.sums import (
    CheckedStep,
    Indivisible,
    Samples,
    checked_step,
    parts_of,
    precision_of,
    samples_of,
    set_sums,
    sums_in_words,
)
from npu_device._src.training.watching import training_state
from npu_device._src.world.current_step import IsSum
from npu_device._src.world.share import lengths_of, run_of, units_of, without_optional

_log = logging.getLogger("npu_device")


class _RankVerdict(NamedTuple):
    """What one rank has found: text for the statement at the start, and of an error or a warning; "" without one."""

    statement: str
    error: str = ""
    warning: str = ""
    sums: IsSum = {}  # noqa: RUF012
    added: str = ""  # in words, what of the step is a sum over the samples


def check(context: StepContext, batch: Any) -> str:
    """Check the step of a built model on all ranks; return the line of the statement, or raise ValueError."""
    if environment.NPU_DEVICE_FIRST_STEP_CHECK.get() == "off":
        return "not checked: NPU_DEVICE_FIRST_STEP_CHECK=off"
    world = context.world
    if needs_no_check(context, batch):
        own_verdict = _RankVerdict(
            "not compared: layers, loss, step and optimizer are Keras's own, which treat samples one by one"
        )
    else:
        with _nothing_drawn():
            own_verdict = _verdict(context, batch)
    # All ranks take part, whatever they have found: an error on one would leave the others waiting here.
    gathered = world.objects(tuple(own_verdict), "first-step check")
    verdicts = [_RankVerdict(*fields) for fields in gathered]
    wrong = [rank for rank, verdict in enumerate(verdicts) if verdict.error]
    if wrong:
        ranks = ""
        if len(wrong) < world.size:
            ranks_of_job = [world.group.ranks[rank] for rank in wrong]
            names = map(world.job.cluster.name_of, ranks_of_job)
            ranks = f"\nFound on {', '.join(names)}."
        raise ValueError(
            f"rank {world.job.cluster.rank}: {verdicts[wrong[0]].error}{ranks}\n"
            "(NPU_DEVICE_FIRST_STEP_CHECK=off leaves this check out.)"
        )
    warnings = [verdict.warning for verdict in verdicts]
    warning = next(filter(None, warnings), "")
    if warning and world.is_main:
        _log.warning("%s", warning)
    # Set alike on all ranks, or their results would differ.
    set_sums(context, [verdict.sums for verdict in verdicts])
    statements = [verdict.statement for verdict in verdicts]
    # The statement of a rank that could not check comes first.
    statement = max(statements, key=lambda text: text.startswith("not checked"))
    added_of_ranks = [verdict.added for verdict in verdicts]
    added = next(filter(None, added_of_ranks), "")
    if added:
        statement += f"\n  sums           {added}: the ranks add up"
    return statement


def find_sums(context: StepContext, batch: Any) -> None:
    """Find out on all ranks which numbers of a test step are sums over the samples."""
    if environment.NPU_DEVICE_FIRST_STEP_CHECK.get() == "off":
        return
    sums = {}
    # What an eager step of the script does in Python can't be undone.
    is_left_out = context.model.run_eagerly and context.is_custom
    if not needs_no_check(context, batch) and not is_left_out:
        try:
            with _nothing_drawn():
                samples = samples_of(without_optional(batch))
                sums = checked_step(context, samples, has_repeats=False).sums
        except Exception:
            # The user's step may rely on what a few samples don't have.
            _log.debug("sums of a test step", exc_info=True)
    # The ranks exchange after a failure, too, because the others take part.
    set_sums(context, context.world.objects(sums, "sums of a test step"))


@contextlib.contextmanager
def _nothing_drawn() -> Iterator[None]:
    # A trace may draw seeds, so that the states are put back after it.
    states = training_state.random_states()
    try:
        with compat.without_rewriting():
            yield
    finally:
        training_state.set_random_states(states)


def require_divisible(
    context: StepContext, spec: Any, own_part: Any, batch: Any, error: Exception
) -> None:
    """Raise an error that says what is divided, if a step can be traced with the batch, but not with a share of it."""
    # A share is traced first: what has been traced with the batch counts as built, and wouldn't be traced again.
    if _can_be_traced(context, spec, own_part):
        return
    if not _can_be_traced(context, spec, lambda whole: whole):
        return
    rank = context.world.job.cluster.rank
    reason = texts.last_line(error)
    text = texts.not_samples(context, batch, reason)
    raise ValueError(f"rank {rank}: {text}") from error


def _can_be_traced(context: StepContext, spec: Any, own_part: Any) -> bool:
    try:
        start.build(context.model, context.mode, context.own_step, spec, own_part)
    except Exception:
        return False
    return True


def _verdict(context: StepContext, batch: Any) -> _RankVerdict:
    try:
        if context.model.run_eagerly and context.is_custom:
            raise NotChecked(
                "the step runs eagerly (run_eagerly=True), and what it does in Python can't be undone"
            )
        samples = samples_of(without_optional(batch))
        checked = checked_step(context, samples, has_repeats=True)
        verdict = _judge(context, samples, checked)
        return verdict._replace(sums=checked.sums, added=sums_in_words(context, checked))
    except NotChecked as error:
        return _RankVerdict(f"not checked: {texts.last_line(error)}")
    except Indivisible as error:
        if context.has_own_data:
            return _RankVerdict("not checked: the step can't run on a part of a rank's batch")
        return _RankVerdict("", str(error))
    except Exception as error:
        # The user's step may rely on what a few samples don't have.
        _log.debug("first-step check", exc_info=True)
        reason = f"{type(error).__name__}: {texts.last_line(error)}"
        verdict = _RankVerdict(f"not checked: the step can't run on a few samples ({reason})")
    # Such a step may need a batch of one size, which it gets here.
    try:
        return _examine_shares(context, batch, verdict)
    except Exception:
        _log.debug("first-step check of shares", exc_info=True)
        return verdict


def _examine_shares(context: StepContext, batch: Any, verdict: _RankVerdict) -> _RankVerdict:
    """Run a step that needs its batch's size on two shares of one size, which shows what it keeps of its samples."""
    batch = without_optional(batch)
    total = int(units_of(batch))
    count = total // max(2, context.world.size)
    # A part is as large as what a rank gets, so that a fixed size inside the step may still fit.
    both = run_of(batch, total, 0, 2 * count)
    parts = parts_of(both, 2 * count, count)
    spec = start.spec_of(context.model, None, parts[0].data)
    dry_step = DryStep(context, spec)
    # The first share is compared with one of other samples, and with itself in reversed order, to find what depends on
    # the samples or on their order.
    [share, other_share] = dry_step.run(parts)
    [repeat, _] = dry_step.run(parts)
    reversed_parts = list(map(_reversed, parts))
    [reversed_share, _] = dry_step.run(reversed_parts)
    if not findings.are_repeatable(share, repeat):
        return verdict
    tolerance = 100 * precision_of(context.model)
    runs = findings.Runs(share, [repeat], [other_share], [1.0], tolerance)
    changes = findings.changes(dry_step, runs, *_variables(context))
    # What each rank keeps comes before what is averaged.
    for change in sorted(changes, key=lambda change: change.is_averaged):
        is_in_order = findings.depends_on_order(change, runs, reversed_share)
        # What is averaged over the ranks may differ between the shares, but not with the order of the samples.
        if not change.is_number and (is_in_order or not change.is_averaged):
            return _RankVerdict("", texts.set_by_samples(context, change, is_in_order))
    return verdict


def _reversed(part: Part) -> Part:
    """Return a part of a batch with its samples in the opposite order."""

    def reverse(leaf: Any) -> Any:
        if leaf is None or not leaf.shape.rank or isinstance(leaf, tf.SparseTensor):
            return leaf
        if isinstance(leaf, tf.RaggedTensor):
            return leaf[::-1]
        return tf.reverse(leaf, [0])

    samples = tf.nest.map_structure(reverse, part.data)
    return replace(part, data=samples)


def _judge(context: StepContext, samples: Samples, checked: CheckedStep) -> _RankVerdict:
    """Return the verdict on a step: the first error, or else all warnings."""
    dry_step = checked.dry_step
    runs = checked.runs
    lines_of_sums, lines_of_losses = findings.added_losses(dry_step, runs)
    if lines_of_sums:
        return _RankVerdict("", texts.summed(context, lines_of_sums[0]))
    gradients = findings.compared_gradients(dry_step, runs)
    different = [gradient for gradient in gradients if not gradient.is_mean]
    # Clipped gradients may look like anything, so that this comes before their comparison.
    clipping = mixing.line_that_clips(dry_step.gradients, dry_step.step.reduced)
    if clipping is None and any(gradient.is_sum for gradient in different):
        return _RankVerdict("", texts.of_two_kinds(context, gradients))
    changes = findings.changes(dry_step, runs, *_variables(context))
    # Changed numbers are only a warning: most are counters, which few scripts depend on.
    kept_changes = [change for change in changes if not change.is_number]
    if kept_changes:
        [reversed_run] = dry_step.run([_reversed(samples.whole)])
        is_in_order = findings.depends_on_order(kept_changes[0], runs, reversed_run)
        return _RankVerdict("", texts.set_by_samples(context, kept_changes[0], is_in_order))
    warnings = [texts.counted(context, change) for change in changes]
    if clipping is not None:
        warnings.append(texts.clipped(context, clipping))
    elif different:
        move = mixing.line_that_moves(dry_step.variables, dry_step.graph)
        if move:
            warnings.append(texts.moved(context, move))
        elif _are_sums_with_more(samples, checked):
            return _RankVerdict("", texts.beside_a_sum(context, different))
        else:
            mixing_point = _mixing_point(context, samples)
            if mixing_point is None and lines_of_losses:
                mixing_point = MixingPoint(f"a loss that a layer adds, {lines_of_losses[0]}", False)
            warnings.append(texts.mixed(context, different, mixing_point, samples.parts))
    titles = findings.numbers_of_no_kind(dry_step, runs)
    # A loss that isn't a mean is named by the other warnings.
    if titles and not warnings:
        warnings.append(texts.averaged(context, titles))
    statement = _statement(samples, bool(warnings))
    return _RankVerdict(statement, warning="\n".join(warnings))


def _statement(samples: Samples, has_warnings: bool) -> str:
    """Return what has been compared, for the statement at the start."""
    verdict = "checked"
    if has_warnings:
        verdict = "checked, with a warning"
    counted_from_1 = [str(position + 1) for position in sorted(samples.positions)]
    numbers = ", ".join(counted_from_1)
    sizes = " and ".join(str(part.units) for part in samples.parts)
    return (
        f"{verdict}: gradients, added losses and variables of samples {numbers} of {samples.total}, "
        f"with those of {sizes} of them"
    )


def _are_sums_with_more(samples: Samples, checked: CheckedStep) -> bool:
    """Return whether gradients are sums beside something else, by a different cut of the samples."""
    count = samples.whole.units
    if count < 3 or checked.dry_step.step.sums.reducers:
        return False
    parts = parts_of(samples.whole.data, count, 1)
    weights = [float(part.fraction) for part in parts]
    other_cut = replace(checked.runs, parts=checked.dry_step.run(parts), weights=weights)
    return findings.are_sums_with_more(checked.runs, other_cut)


def _mixing_point(context: StepContext, samples: Samples) -> MixingPoint | None:
    """Return where samples meet; None if it can't be found."""
    try:
        dry_step = DryStep(context, samples.spec, mixing.values_of_samples)
        [whole] = dry_step.run([samples.whole])
        parts = dry_step.run(samples.parts)
    except Exception:
        # The search may fail, but the check itself has been made.
        return None
    arrays_of_parts = [run.chosen_arrays for run in parts]
    rows = [part.units for part in samples.parts]
    return mixing.where_samples_meet(
        dry_step.chosen_tensors, whole.chosen_arrays, arrays_of_parts, rows
    )


def _variables(context: StepContext) -> tuple[dict[int, Any], set[int]]:
    """Return the variables that a step may change only as one process does, and those that are averaged; by handle."""
    model = context.model
    objects = context.objects
    variables = training_state.common(model, compat.variables_of(model))
    named = _by_handle([*variables, *training_state.loose_variables(model)])
    # The ranks reduce the states of metrics and optimizers themselves.
    reduced = training_state.optimizer_state(model)
    reduced += [variable for metric in objects.metrics for variable in metric.variables]
    for handle in _by_handle(reduced):
        named.pop(handle, None)
    return named, set(_by_handle(objects.statistics))


def _by_handle(variables: Iterable) -> dict[int, Any]:
    return {id(compat.handle_of(variable)): variable for variable in variables}


_LOSSES = (
    "binarycrossentropy binaryfocalcrossentropy categoricalcrossentropy categoricalfocalcrossentropy categoricalhinge "
    "cosinesimilarity hinge huber kldivergence logcosh meanabsoluteerror meanabsolutepercentageerror meansquarederror "
    "meansquaredlogarithmicerror poisson sparsecategoricalcrossentropy squaredhinge"
)
"""Those that have one value for each sample. Dice, Tversky and CircleLoss, for instance, compare the samples."""

_LAYERS_OF_SCRIPTS = (*xla.LAYERS_OF_SCRIPTS, "AddLoss")
"""Keras's layers that hold anything that the user has written."""


def needs_no_check(context: StepContext, batch: Any) -> bool:
    """Return True for a functional model of Keras's own layers with a built-in loss and dense inputs of one length."""
    model = context.model
    losses = context.objects.losses
    if context.is_custom or not compat.belongs_to_keras(type(model)) or not losses:
        return False
    optimizers = training_state.optimizers(model)
    if not all(map(compat.computes_gradients_as_keras, optimizers)):
        return False
    if not all(map(_is_well_known_loss, losses)):
        return False
    if not all(map(_treats_samples_apart, compat.operations_of(model))):
        return False
    if any(isinstance(leaf, tf.RaggedTensor) for leaf in tf.nest.flatten(batch)):
        return False
    # Tensors of different lengths are divided by units, of which a model may know nothing.
    lengths = set(map(int, lengths_of(batch)))
    return len(lengths) == 1


def _is_well_known_loss(loss: Any) -> bool:
    definition = getattr(loss, "fn", None) or type(loss)
    name = getattr(definition, "__name__", "").lower().replace("_", "")
    is_from_keras = compat.belongs_to_keras(type(loss)) and compat.belongs_to_keras(definition)
    return is_from_keras and name in _LOSSES.split()


def _treats_samples_apart(layer: Any) -> bool:
    if not compat.is_layer(layer) or not compat.belongs_to_keras(type(layer)):
        return False
    if type(layer).__name__ in _LAYERS_OF_SCRIPTS:
        return False
    # An operation along axis 0 mixes samples.
    if 0 in tf.nest.flatten(getattr(layer, "axis", None)):
        return False
    activation = getattr(layer, "activation", None)
    if activation is not None and not compat.belongs_to_keras(activation):
        return False
    return getattr(layer, "activity_regularizer", None) is None
