"""What the first-step check says: errors and warnings of a step that can't be divided, each with its remedy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from npu_device._src.training.fit.dry_step import Part
from npu_device._src.training.fit.findings import Change, ComparedGradient
from npu_device._src.training.fit.mixing import MixingPoint
from npu_device._src.training.fit.step_context import StepContext
from npu_device._src.wording import shortened
from npu_device._src.world.share import shapes_of


def last_line(error: BaseException) -> str:
    """Return what an error says, without the user's lines that AutoGraph and TensorFlow put around it."""
    stripped = map(str.strip, str(error).splitlines())
    lines = list(filter(None, stripped)) or ["no message"]
    # TensorFlow says what has failed in the line before the name of the node.
    nodes = [index for index, line in enumerate(lines) if "{{node" in line]
    if isinstance(error, tf.errors.OpError) and nodes and nodes[-1]:
        # Only one line is taken, and cut, since TensorFlow repeats whole graphs in its messages.
        return lines[nodes[-1] - 1][:200]
    # Behind AutoGraph's lines, the text of the error begins with its class.
    opening = f"{type(error).__name__}: "
    openings = [line for line in lines if line.startswith(opening)]
    line = [lines[0], *openings][-1]
    return line.split(opening)[-1][:200]


def _title(context: StepContext) -> str:
    return f"the train step of {context.model.name!r}"


def _names(gradients: Sequence[ComparedGradient]) -> str:
    return shortened([gradient.name for gradient in gradients], 3)


_TAKE_THE_MEAN = (
    "What to do: take the mean over the samples, tf.reduce_mean(loss); for a sum, pass a loss object with "
    "reduction='sum' to compile, or keep it as an attribute of the model."
)


def beside_a_sum(context: StepContext, different: Sequence[ComparedGradient]) -> str:
    """Return the error for sums over the samples with a penalty that isn't one."""
    return (
        f"{_title(context)} adds up what its samples give beside what doesn't depend on them, such as a penalty on "
        f"weights: in the gradient of {_names(different)}. As means over the {context.world.size} ranks, the sums "
        f"would be {context.world.size} times too small; as sums, the rest {context.world.size} times too "
        f"large.\n{_TAKE_THE_MEAN}"
    )


def of_two_kinds(context: StepContext, gradients: Sequence[ComparedGradient]) -> str:
    """Return the error for an optimizer some of whose gradients are sums over the samples."""
    sums = [gradient for gradient in gradients if gradient.is_sum and not gradient.is_mean]
    same_optimizer = [gradient for gradient in gradients if gradient.reducer is sums[0].reducer]
    not_sums = [gradient for gradient in same_optimizer if not gradient.is_sum]
    return (
        f"{_title(context)} adds up what its samples give in some gradients of an optimizer, but not in others: those "
        f"of {_names(sums)} are sums over the samples, those of {_names(not_sums)} aren't. Means over the "
        f"{context.world.size} ranks would be {context.world.size} times too small for the former, sums too large for "
        "the latter.\n"
        "Likely cause: a loss with one value per sample, or their sum, is differentiated together with a mean or with "
        "a penalty on weights; or a regularizer multiplies samples with each other (tf.tensordot).\n"
        f"{_TAKE_THE_MEAN}"
    )


def summed(context: StepContext, line: str) -> str:
    """Return the error for a layer that adds a loss that is a sum over the samples."""
    return (
        f"{_title(context)} adds up what its samples give where a replicated model expects their mean: a loss that a "
        f"layer adds, {line}.\nEach of the {context.world.size} ranks has its share of the batch, so that the result "
        f"would be {context.world.size} times too small.\nWhat to do: take the mean over the samples, "
        "tf.reduce_mean(loss)."
    )


def set_by_samples(context: StepContext, change: Change, is_in_order: bool) -> str:
    """Return the error for a variable that would keep values of the samples of one rank, perhaps in their order."""
    line = ""
    if change.line:
        line = f"\nSet by: {change.line}"
    if change.is_by_gradients:
        predicate = "changes by the gradients of its samples, without an optimizer"
        remedy = "reduce the gradients first: gradients = npu.distribute.all_reduce(gradients)"
    elif change.is_sum:
        predicate = "adds up values of the samples"
        remedy = "add up over the ranks first: value = npu.distribute.all_reduce(value, 'sum')"
    elif not is_in_order:
        predicate = "is computed from sums or means over the samples"
        remedy = (
            "take these over all ranks: mean = npu.distribute.all_reduce(tf.reduce_mean(x, axis=0)), or "
            "npu.distribute.all_reduce(total, 'sum') for a sum or a count. If only the first batch sets it, you can "
            "also call the model on that batch before npu.distribute.replicate"
        )
    else:
        predicate = "takes values of the samples, as a queue or a memory bank does"
        remedy = (
            "give it those of all ranks: value = npu.distribute.all_gather(value) before it is set"
        )
    content = "another value on each rank"
    if change.is_averaged:
        content = "the mean over the ranks"
    return (
        f"{_title(context)} sets {change.name!r}: it {predicate}. On {context.world.size} ranks it would hold "
        f"{content}, not what one process has.{line}\nWhat to do: {remedy}."
    )


def counted(context: StepContext, change: Change) -> str:
    """Return the warning for a number that changes by the samples of one rank."""
    content = "each rank's own"
    if change.is_averaged:
        content = "averaged over the ranks"
    line = ""
    if change.line:
        line = f" ({change.line})"
    return (
        f"{_title(context)} changes {change.name!r} by its samples{line}. On {context.world.size} ranks this is "
        f"{content}, not what one process has.\nWhat to do: count steps, not samples; or reduce what is added first, "
        "with npu.distribute.all_reduce."
    )


def averaged(context: StepContext, titles: Sequence[str]) -> str:
    """Return the warning for numbers of metrics and logs that are neither means nor sums over the samples."""
    return (
        f"{_title(context)} computes a number of its samples that is neither their mean nor their sum, for "
        f"{', '.join(titles)}. The {context.world.size} ranks average it, which isn't what one process has.\n"
        "Likely cause: a root, an exponential, a norm, a maximum or a quotient of sums.\n"
        "What to do: compute it from means or sums over all ranks, for example "
        "tf.exp(npu.distribute.all_reduce(loss)); or give a metric the quotient, and what it is divided by as "
        "sample_weight. Training itself is right."
    )


def clipped(context: StepContext, line: str) -> str:
    """Return the warning for gradients that a step changes before they are reduced."""
    return (
        f"{_title(context)} clips or changes gradients before they are reduced over the {context.world.size} ranks: "
        f"{line}\nEach rank does that with the gradients of its own samples, which gives another result than on one "
        "process.\nWhat to do: reduce them first, gradients = npu.distribute.all_reduce(gradients); in a class of "
        "optimizers, change them in apply_gradients, which gets those of all ranks; or set clipnorm, global_clipnorm "
        "or clipvalue."
    )


def moved(context: StepContext, line: str) -> str:
    """Return the warning for a step that moves weights by gradients of its samples."""
    return (
        f"{_title(context)} moves weights by gradients, and computes others there: {line}\nEach of the "
        f"{context.world.size} ranks moves them by the gradients of its own samples, so that the result is another one "
        "than on one process.\nWhat to do: reduce those gradients before the move: gradients = "
        "npu.distribute.all_reduce(gradients). The optimizer reduces the others."
    )


def mixed(
    context: StepContext,
    different: Sequence[ComparedGradient],
    mixing_point: MixingPoint | None,
    parts: Sequence[Part],
) -> str:
    """Return the warning for a step that doesn't treat samples one by one; ``parts`` are the two of the samples."""
    head = parts[0].units
    tail = parts[1].units
    if mixing_point is not None and mixing_point.is_of_a_sample:
        sight = f"Samples first meet in {mixing_point.text}"
        remedy = (
            "to compare or mix the samples of all ranks, gather them first: "
            "values = npu.distribute.all_gather(values)"
        )
    else:
        sight = (
            "No operation before the loss mixes samples: the loss isn't a mean over them, such as a mean over their "
            "valid steps, or a root or a quotient of sums"
        )
        if mixing_point is not None:
            sight += f". This begins in {mixing_point.text}"
        remedy = (
            "to leave out steps, use a mask, ignore_class or sample_weight instead of a loss function that divides by "
            "their number; keep a loss object as an attribute of the model. Or take the sums, also that of the steps, "
            "over all ranks before you divide: total = npu.distribute.all_reduce(total, 'sum')"
        )
    return (
        f"{_title(context)} doesn't treat samples one by one: the gradient of {head + tail} samples isn't the mean of "
        f"those of {head} and {tail} of them. The largest difference is that of {different[0].name}, "
        f"{100 * different[0].error:.2g} %.\n{sight}.\nEach of the {context.world.size} ranks sees its share of the "
        f"batch only, so that the result is another one than on one process.\nWhat to do: {remedy}."
    )


def not_samples(context: StepContext, batch: Any, error: str) -> str:
    """Return the error for a batch that can't be divided along the first axes of its tensors."""
    return (
        f"a replicated model divides a batch among the {context.world.size} ranks along the first axis of each tensor, "
        f"but the train step fails with a part of these:\n{shapes_of(batch)}\n  {error}\nLikely cause: the first axis "
        "isn't samples, as in pairs or graphs; or the model has a fixed batch size.\nWhat to do: put the samples first "
        "in each tensor; or let each rank read its own batches, and pass them as npu.distribute.divided(dataset)."
    )
