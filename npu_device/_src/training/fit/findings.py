"""What the first-step check finds when it compares a step on some samples with the same step on parts of them: what
differs, the user's lines behind it, and what is said.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from npu_device._src import compat
from npu_device._src.training.fit.graph_lines import where
from npu_device._src.training.fit.rehearsal import Outcome, Part, Rehearsal
from npu_device._src.training.fit.weighting import ADDED_LOSS, LOSS
from npu_device._src.training.watching.digests import variable_name
from npu_device._src.world.share import shapes_of
from npu_device._src.world.world import World

_SAFETY = 20  # times what rounding has been seen to change


@dataclass(frozen=True)
class Runs:
    before: Sequence[np.ndarray]  # the values of the variables before the step
    whole: Outcome  # of all samples
    again: Sequence[Outcome]  # of all samples once more, and with weights that differ by rounding
    parts: Sequence[Outcome]
    weights: Sequence[float]  # the parts' fractions of the samples
    tolerance: float  # largest difference that counts as rounding, relative


@dataclass(frozen=True)
class Comparison:
    """A gradient of all samples, compared with those of the parts."""

    name: str  # of its variable
    reduction: Any  # of its optimizer
    size: float  # of the difference from the mean over the parts, relative to the gradient
    is_mean: bool  # it is the mean over the parts, as a gradient of 0 is
    is_sum: bool  # it is the sum over the parts, as a gradient of 0 is


def repeats(first: Outcome, second: Outcome) -> bool:
    pairs = [_dense([one, other]) for one, other in zip(first.gradients, second.gradients)]
    if all(np.array_equal(one, other) for one, other in pairs):
        return True
    size = np.sqrt(sum(_norm(one) ** 2 for one, _ in pairs))
    return all(_norm(one - other) <= 0.01 * (_norm(one) + size) for one, other in pairs)


def is_finite(outcome: Outcome) -> bool:
    dense = [_dense([gradient])[0] for gradient in outcome.gradients]
    is_known = all(bool(np.all(np.isfinite(each))) for each in dense)
    return is_known and (not dense or any(_norm(each) > 0 for each in dense))


def comparisons(rehearsal: Rehearsal, runs: Runs) -> list[Comparison]:
    """Compare the gradients, the largest difference first."""
    found = []
    each = list(zip(runs.whole.gradients, *[run.gradients for run in [*runs.again, *runs.parts]]))
    dense = [_dense(values) for values in each]
    size = float(np.sqrt(sum(_norm(values[0]) ** 2 for values in dense)))
    for variable, reduction, values in zip(rehearsal.variables, rehearsal.reductions, dense):
        whole, again, parts = (
            values[0],
            values[1 : 1 + len(runs.again)],
            values[1 + len(runs.again) :],
        )
        rounding = max(_norm(other - whole) for other in again)
        allowed = runs.tolerance * (_norm(whole) + 0.01 * size) + _SAFETY * rounding
        # By what a part was multiplied: 1 if the optimizer adds up gradients, for all that is known.
        weights = (
            [1.0] * len(parts) if reduction in rehearsal.step.sums.reductions else runs.weights
        )
        error = _norm(whole - sum(parts))
        total = sum(part / weight for part, weight in zip(parts, weights))
        is_mean, is_sum = error <= allowed, _norm(whole - total) <= allowed
        found.append(
            Comparison(
                variable_name(variable), reduction, error / (_norm(whole) + 1e-30), is_mean, is_sum
            )
        )
    return sorted(found, key=lambda comparison: -comparison.size)


def are_sums_with_more(runs: Runs, others: Sequence[Outcome], weights: Sequence[float]) -> bool:
    """Return whether all gradients are sums over the samples and something else, the same for any samples.

    Added up over parts, they have too much of the latter, whatever the parts; ``others`` are parts of other sizes.
    """
    found = False
    for place, gradient in enumerate(runs.whole.gradients):
        parts = [run.gradients[place] for run in (*runs.parts, *others)]
        whole, *values = _dense([gradient, *parts])
        values = [value / weight for value, weight in zip(values, (*runs.weights, *weights))]
        too_much, again = (
            sum(some) - whole for some in (values[: len(runs.parts)], values[len(runs.parts) :])
        )
        if not _norm(too_much - again) <= 1e-3 * _norm(whole - too_much):
            return False
        found = found or _norm(too_much) > 1e-3 * _norm(whole)
    return found


def adding(compared: Sequence[Comparison]) -> dict[Any, bool]:
    """Return for each reduction if all its gradients are sums over the samples, or means; without those of 0."""
    found = {}
    for reduction in dict.fromkeys(comparison.reduction for comparison in compared):
        own = [comparison for comparison in compared if comparison.reduction is reduction]
        are_sums = all(comparison.is_sum for comparison in own)
        if reduction is not None and are_sums != all(comparison.is_mean for comparison in own):
            found[reduction] = are_sums
    return found


def kinds(runs: Runs) -> dict[str, bool]:
    """Return which numbers of a step are sums over the samples, and which means, if need be by what is closer."""
    found = {}
    for name, whole in runs.whole.numbers.items():
        parts = [run.numbers[name] for run in runs.parts]
        from_sum = abs(whole - sum(parts))
        from_mean = abs(whole - sum(part * weight for part, weight in zip(parts, runs.weights)))
        if abs(from_sum - from_mean) > 1e-6 * abs(whole):  # which they aren't for 0 and NaN
            is_loss = name.startswith((LOSS, ADDED_LOSS))
            found[name] = bool(
                from_sum < from_mean and (not is_loss or from_sum <= 1e-3 * abs(whole))
            )
    return found


def added_losses(rehearsal: Rehearsal, runs: Runs) -> tuple[list[str], list[str]]:
    """Return the lines at which layers add losses that are sums over the samples, and others that aren't means."""
    sums: list[str] = []
    others: list[str] = []
    for place, tensor in enumerate(rehearsal.losses):
        whole = float(runs.whole.losses[place])
        parts = [float(run.losses[place]) for run in runs.parts]
        allowed = 10 * runs.tolerance * abs(whole) + _SAFETY * max(
            abs(run.losses[place] - whole) for run in runs.again
        )
        if abs(whole - sum(part * weight for part, weight in zip(parts, runs.weights))) > allowed:
            found = sums if abs(whole - sum(parts)) <= allowed else others
            found.append(where(tensor.op) or tensor.op.name)
    return sums, others


@dataclass(frozen=True)
class Change:
    """A variable that the step changes by the samples, so that the ranks' values aren't those of one process."""

    name: str
    line: str  # that changes it; "" if unknown
    is_sum: bool  # its increments are sums over the samples
    is_number: bool  # it is a number, or counts
    is_averaged: bool  # the ranks' increments are averaged; else each rank keeps its own
    is_by_gradients: bool  # it is set by what a tape has computed
    place: int  # among the variables that the step changes
    is_in_order: bool = True  # it depends on the order of the samples, as a queue of them does


def changes(
    rehearsal: Rehearsal, runs: Runs, named: dict[int, Any], averaged: set[int]
) -> list[Change]:
    """Return the ``named`` variables, by their handles' ``id``, that the step changes unlike one process."""
    found = []
    for place, handle in enumerate(rehearsal.handles):
        if id(handle) not in named:
            continue
        before = runs.before[place]
        values = [outcome.state[place] for outcome in (runs.whole, *runs.again, *runs.parts)]
        same_shape = all(value.shape == before.shape for value in values)
        is_averaged, is_sum, differs = id(handle) in averaged, False, True
        if same_shape:
            start = before.astype(np.float64)
            moves = [value.astype(np.float64) - start for value in values]
            whole, again, parts = (
                moves[0],
                moves[1 : 1 + len(runs.again)],
                moves[1 + len(runs.again) :],
            )
            rounding = max(_norm(other - whole) for other in again)
            allowed = 10 * runs.tolerance * _norm(whole) + _SAFETY * rounding + 1e-6 * _norm(start)
            mean = sum(part * weight for part, weight in zip(parts, runs.weights))
            wrong = (
                _norm(whole - mean) if is_averaged else max(_norm(whole - part) for part in parts)
            )
            differs, is_sum = wrong > allowed, _norm(whole - sum(parts)) <= allowed
        if differs:
            is_number = not before.shape or not np.issubdtype(before.dtype, np.floating)
            name, setters = variable_name(named[id(handle)]), _setters(rehearsal.graph, handle)
            line = next((line for line in map(where, setters) if line), "")
            is_by_gradients = any(map(_is_of_gradients, setters))
            found.append(Change(name, line, is_sum, is_number, is_averaged, is_by_gradients, place))
    return found


def depends_on_order(change: Change, runs: Runs, turned: Outcome) -> bool:
    """Return whether a variable has a different value when the samples come in a different order."""
    value, other = runs.whole.state[change.place], turned.state[change.place]
    return value.shape != other.shape or not np.allclose(value, other, rtol=1e-3, atol=1e-6)


def moving(rehearsal: Rehearsal) -> str | None:
    """Return the line at which a step sets a weight by gradients of its samples before it computes others, or None."""
    for variable in rehearsal.variables:
        for setter in _setters(rehearsal.graph, compat.handle_of(variable)):
            if _is_of_gradients(setter):
                return where(setter) or setter.name
    return None


def _setters(graph: Any, handle: Any) -> list[Any]:
    users = [
        user for outer, inner in graph.captures if outer is handle for user in inner.consumers()
    ]
    return [user for user in users if user.type.startswith("Assign")]


def _is_of_gradients(operation: Any) -> bool:
    behind = compat.tensors_behind(operation.inputs)
    return any(tensor.op.name.startswith(_TAPE) for tensor in behind)


def _dense(values: Sequence[Any]) -> list[np.ndarray]:
    """Return gradients of one variable as arrays of one shape; of tables only the rows that any of them has."""
    if not isinstance(values[0], (tuple, list)):
        return [_wide(value) for value in values]
    rows = np.unique(np.concatenate([np.asarray(indices) for _, indices in values]))
    found = []
    for given, indices in values:
        array = _wide(given)
        dense = np.zeros([len(rows), *array.shape[1:]], array.dtype)
        np.add.at(dense, np.searchsorted(rows, np.asarray(indices)), array)
        found.append(dense)
    return found


def _wide(value: Any) -> np.ndarray:
    array = np.asarray(value)
    return array if array.dtype in (np.float32, np.float64) else array.astype(np.float32)


def _norm(array: Any) -> float:
    return float(np.linalg.norm(np.ravel(array)))


_TAPE = "gradient_tape/"  # before the name of an operation that a tape has made
_NOT_LINEAR = {
    "ClipByValue", "L2Loss", "Maximum", "Minimum", "Pow", "Rsqrt", "Sign", "Sqrt", "Square", "SquaredDifference",
    "Tanh",
}  # fmt: skip
_MOST = 3000
_SMALL = 4096  # elements of a vector


def clipping(gradients: Sequence[Any], reduced: Sequence[Any]) -> str | None:
    """Return the line at which a step changes gradients that it hasn't reduced in a way that isn't linear, or None."""
    done = {
        id(part) for value in reduced for part in tf.nest.flatten(value, expand_composites=True)
    }
    parts = [
        part for gradient in gradients for part in tf.nest.flatten(gradient, expand_composites=True)
    ]

    def is_left_out(tensor: Any) -> bool:
        return id(tensor) in done or tensor.op.name.startswith(_TAPE)

    def is_of_gradients(operation: Any) -> bool:
        behind = compat.tensors_behind(operation.inputs, lambda tensor: id(tensor) in done)
        return any(tensor.op.name.startswith(_TAPE) for tensor in behind)

    behind = {tensor.op.name: tensor.op for tensor in compat.tensors_behind(parts, is_left_out)}
    suspects = [operation for operation in behind.values() if operation.type in _NOT_LINEAR]
    for suspect in sorted(suspects, key=lambda operation: len(operation.name)):
        if is_of_gradients(suspect):
            return where(suspect) or suspect.name
    return None


def values_of_samples(graph: Any) -> list[Any]:
    """Return the tensors of a graph that may hold a value for each sample, and small ones that may be made of those, in
    the order in which they were created; without what is computed of gradients only to apply them.
    """
    operations = graph.get_operations()
    by_tape = [operation for operation in operations if operation.name.startswith(_TAPE)]
    used = {
        tensor.op.name
        for tensor in compat.tensors_behind([one for each in by_tape for one in each.inputs])
    }
    of_gradients: set[str] = set()
    found = []
    for operation in operations:
        is_of_gradients = any(each.op.name in of_gradients for each in operation.inputs)
        if is_of_gradients or operation.name.startswith(_TAPE):
            of_gradients.add(operation.name)
        is_used = operation.name in used or any(each.op.name in used for each in operation.inputs)
        if (
            operation.name.startswith(_TAPE)
            or not is_used
            or (is_of_gradients and operation.name not in used)
        ):
            continue
        found += [
            output
            for output in operation.outputs
            if output.dtype.is_floating and _may_be_of_samples(output)
        ]
    return found[:_MOST]


def _may_be_of_samples(tensor: Any) -> bool:
    rank = tensor.shape.rank
    return rank is not None and (
        rank == 0 or tensor.shape[0] is None or (rank == 1 and tensor.shape[0] <= _SMALL)
    )


def where_samples_meet(
    tensors: Sequence[Any],
    whole: Sequence[np.ndarray],
    parts: Sequence[Sequence[np.ndarray]],
    rows: Sequence[int],
) -> tuple[str, bool] | None:
    """Return the operation, and its line, at which a value first depends on several samples, unlike a mean or sum; and
    if it is the value of a sample.
    """
    values = [
        (tensor, whole[place], [part[place] for part in parts])
        for place, tensor in enumerate(tensors)
    ]
    for tensor, value, others in values:
        if _is_per_sample(tensor) and not _are_the_same(value, others, rows):
            return _described(tensor.op), True
    small = [each for each in values if not _is_per_sample(each[0])]
    reduced = [(tensor, _is_added_up(value, others, rows)) for tensor, value, others in small]
    mixed = {tensor.op.name for tensor, is_added_up in reduced if not is_added_up}
    for tensor, is_added_up in reduced:
        # One by a number of samples, for instance, makes a mean of a sum.
        users = {
            other.op.name for other, _ in reduced if any(each is tensor for each in other.op.inputs)
        }
        if not is_added_up and users <= mixed:
            return _described(tensor.op), False
    return None


def _is_per_sample(tensor: Any) -> bool:
    return bool(tensor.shape.rank) and tensor.shape[0] is None


def _described(operation: Any) -> str:
    line = where(operation)
    return f"{operation.name}{', ' + line if line else ''}"


def _is_added_up(whole: np.ndarray, parts: Sequence[np.ndarray], rows: Sequence[int]) -> bool:
    """Return whether a value is the same for all samples, or the mean or the sum over the parts."""
    wide = [part.astype(np.float64) for part in parts]
    mean = sum(part * count for part, count in zip(wide, rows)) / sum(rows)
    return any(
        np.allclose(whole, value, rtol=1e-3, atol=1e-6) for value in (mean, sum(wide), wide[0])
    )


def _are_the_same(whole: np.ndarray, parts: Sequence[np.ndarray], rows: Sequence[int]) -> bool:
    if any(part.shape[1:] != whole.shape[1:] for part in parts):
        return False
    if len(whole) != sum(map(len, parts)):
        return True  # its first axis isn't samples
    ways = [np.concatenate(parts)]
    views = len(whole) // sum(rows)
    if views > 1 and [len(each) for each in (whole, *parts)] == [
        views * count for count in (sum(rows), *rows)
    ]:
        # of each sample, one after the other
        each = [part.reshape(views, count, *whole.shape[1:]) for part, count in zip(parts, rows)]
        ways.append(np.concatenate(each, axis=1).reshape(whole.shape))
    wide = whole.astype(np.float64)
    size = 1e-3 * float(np.max(np.abs(wide), initial=0.0)) + 1e-9
    return any(bool(np.all(np.abs(wide - way.astype(np.float64)) <= size)) for way in ways)


# What is said.


def last_line(error: BaseException) -> str:
    """Return what an error says, without the user's lines that AutoGraph and TensorFlow put around it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or ["no message"]
    nodes = [place for place, line in enumerate(lines) if "{{node" in line]
    if isinstance(error, tf.errors.OpError) and nodes and nodes[-1]:
        return lines[nodes[-1] - 1][:200]
    users = [line for line in lines if line.startswith(f"{type(error).__name__}: ")]
    line = users[-1] if users else lines[0]
    return line.split(f"{type(error).__name__}: ")[-1][:200]


def names(different: Sequence[Comparison]) -> str:
    shown = ", ".join(difference.name for difference in different[:3])
    return shown + (f" and {len(different) - 3} more" if len(different) > 3 else "")


_TAKE_THE_MEAN = (
    "What to do: take the mean over the samples, tf.reduce_mean(loss); for a sum, pass a loss object with "
    "reduction='sum' to compile, or keep it as an attribute of the model."
)


def beside_a_sum(title: str, different: Sequence[Comparison], world: World) -> str:
    return (
        f"{title} adds up what its samples give beside what doesn't depend on them, such as a penalty on weights: in "
        f"the gradient of {names(different)}. As means over the {world.size} ranks, the sums would be {world.size} "
        f"times too small; as sums, the rest {world.size} times too large.\n{_TAKE_THE_MEAN}"
    )


def of_two_kinds(title: str, compared: Sequence[Comparison], world: World) -> str:
    sums = [comparison for comparison in compared if comparison.is_sum and not comparison.is_mean]
    reduction = sums[0].reduction
    others = [each for each in compared if each.reduction is reduction and not each.is_sum]
    return (
        f"{title} adds up what its samples give in some gradients of an optimizer, but not in others: those of "
        f"{names(sums)} are sums over the samples, those of {names(others)} aren't. Means over the {world.size} ranks "
        f"would be {world.size} times too small for the former, sums too large for the latter.\nLikely cause: a loss "
        "with one value per sample, or their sum, is differentiated together with a mean or with a penalty on weights; "
        "or a regularizer multiplies samples with each other (tf.tensordot).\n"
        f"{_TAKE_THE_MEAN}"
    )


def summed(title: str, line: str, world: World) -> str:
    return (
        f"{title} adds up what its samples give where a replicated model expects their mean: a loss that a layer adds, "
        f"{line}.\nEach of the {world.size} ranks has its share of the batch, so that the result would be "
        f"{world.size} times too small.\nWhat to do: take the mean over the samples, tf.reduce_mean(loss)."
    )


def kept(title: str, change: Change, world: World) -> str:
    line = f"\nSet by: {change.line}" if change.line else ""
    if change.is_by_gradients:
        how = "changes by the gradients of its samples, without an optimizer"
        remedy = "reduce the gradients first: gradients = npu.distribute.all_reduce(gradients)"
    elif change.is_sum:
        how = "adds up values of the samples"
        remedy = "add up over the ranks first: value = npu.distribute.all_reduce(value, 'sum')"
    elif not change.is_in_order:
        how = "is computed from sums or means over the samples"
        remedy = (
            "take these over all ranks: mean = npu.distribute.all_reduce(tf.reduce_mean(x, axis=0)), or "
            "npu.distribute.all_reduce(total, 'sum') for a sum or a count. If only the first batch sets it, you can "
            "also call the model on that batch before npu.distribute.replicate"
        )
    else:
        how = "takes values of the samples, as a queue or a memory bank does"
        remedy = (
            "give it those of all ranks: value = npu.distribute.all_gather(value) before it is set"
        )
    kept = "the mean over the ranks" if change.is_averaged else "another value on each rank"
    return (
        f"{title} sets {change.name!r}: it {how}. On {world.size} ranks it would hold {kept}, not what one process "
        f"has.{line}\nWhat to do: {remedy}."
    )


def counted(title: str, change: Change, world: World) -> str:
    how = "averaged over the ranks" if change.is_averaged else "each rank's own"
    line = f" ({change.line})" if change.line else ""
    return (
        f"{title} changes {change.name!r} by its samples{line}. On {world.size} ranks this is {how}, not what one "
        "process has.\nWhat to do: count steps, not samples; or reduce what is added first, with "
        "npu.distribute.all_reduce."
    )


def clipped(title: str, line: str, world: World) -> str:
    return (
        f"{title} clips or changes gradients before they are reduced over the {world.size} ranks: {line}\nEach rank "
        "does that with the gradients of its own samples, which gives another result than on one process.\nWhat to do: "
        "reduce them first, gradients = npu.distribute.all_reduce(gradients); in a class of optimizers, change them in "
        "apply_gradients, which gets those of all ranks; or set clipnorm, global_clipnorm or clipvalue."
    )


def moved(title: str, line: str, world: World) -> str:
    return (
        f"{title} moves weights by gradients, and computes others there: {line}\nEach of the {world.size} ranks moves "
        "them by the gradients of its own samples, so that the result is another one than on one process.\nWhat to do: "
        "reduce those gradients before the move: gradients = npu.distribute.all_reduce(gradients). The optimizer "
        "reduces the others."
    )


def meeting(
    title: str,
    different: Sequence[Comparison],
    place: tuple[str, bool] | None,
    parts: Sequence[Part],
    world: World,
) -> str:
    head, tail = parts[1].units, parts[2].units
    where_it_is, is_of_a_sample = place or ("", False)
    if is_of_a_sample:
        seen = f"Samples first meet in {where_it_is}"
        remedy = (
            "to compare or mix the samples of all ranks, gather them first: "
            "values = npu.distribute.all_gather(values)"
        )
    else:
        seen = "No operation before the loss mixes samples: the loss isn't a mean over them, such as a mean over their "
        seen += "valid steps, or a root or a quotient of sums"
        seen += f". This begins in {where_it_is}" if place else ""
        remedy = (
            "to leave out steps, use a mask, ignore_class or sample_weight instead of a loss function that divides by "
            "their number. Or take the sums, also that of the steps, over all ranks before you divide: total = "
            "npu.distribute.all_reduce(total, 'sum')"
        )
    return (
        f"{title} doesn't treat samples one by one: the gradient of {head + tail} samples isn't the mean of those of "
        f"{head} and {tail} of them. The largest difference is that of {different[0].name}, "
        f"{100 * different[0].size:.2g} %.\n{seen}.\nEach of the {world.size} ranks sees its share of the batch only, "
        f"so that the result is another one than on one process.\nWhat to do: {remedy}."
    )


def not_samples(batch: Any, error: str, world: World) -> str:
    return (
        f"a replicated model divides a batch among the {world.size} ranks along the first axis of each tensor, but the "
        f"train step fails with a part of these:\n{shapes_of(batch)}\n  {error}\nLikely cause: the first axis isn't "
        "samples, as in pairs or graphs; or the model has a fixed batch size.\nWhat to do: put the samples first in "
        "each tensor; or let each rank read its own batches, and pass them as npu.distribute.divided(dataset)."
    )
