"""Gradients that an optimizer of Keras 3 adds up over several steps: each rank adds up its own ones in the accumulators
of Keras, and the ranks reduce them in the step that updates the variables.

Between two updates, the mean over the ranks of an accumulator is what one process has in it. So a rank may also hold
that mean itself: what is reduced in each step, and what a checkpoint gives to another number of ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Callable

import tensorflow as tf

from npu_device._src import compat
from npu_device._src.gradients.reduction import Gradient
from npu_device._src.trace.trace import iteration
from npu_device._src.training.watching.partial_sums import note_partial_sums
from npu_device._src.world.world import World

_Reduce = Callable[..., "list[Gradient]"]


def note_accumulators(world: World, optimizer: Any) -> None:
    """Note where an optimizer adds up the gradients of this rank, if it is built."""
    accumulators = compat.all_accumulators_of(optimizer)
    steps = compat.accumulation_steps(optimizer)
    note_partial_sums(world, accumulators, compat.steps_made(optimizer), steps)


def accumulate(
    world: World,
    optimizer: Any,
    contributions: Sequence[Gradient],
    variables: Sequence,
    reduce: _Reduce,
    waits_for_update: dict[int, bool],
    owners: Sequence[int] | None = None,
) -> list[Gradient]:
    """Return the gradients that Keras is to apply to some variables, or to add up if it isn't time for an update.

    Args:
        optimizer: is built.
        contributions: of this rank; their mean over the ranks is the gradient of one process.
        variables: one for each contribution.
        reduce: returns the mean of gradients over the ranks; given owners, each rank gets its own.
        waits_for_update: by the id of a variable, whether its gradients are reduced in the update only. Kept here.
        owners: which rank of the group updates each variable; by default each rank updates all. Keras gets the
            gradients of this rank's variables only, and those of others are added up here.
    """
    # Decided at the first step: later ones must go the same way, or a sum would be reduced twice.
    _choose_for_sparse(world, optimizer, contributions, variables, waits_for_update)
    late = []  # the positions of gradients that are reduced in the update
    early = []  # the positions of gradients that are reduced now
    for position, (contribution, variable) in enumerate(zip(contributions, variables)):
        if contribution is None:
            continue
        waits = not compat.is_overwritten(variable)
        if waits_for_update.setdefault(id(compat.inner_variable(variable)), waits):
            late.append(position)
        else:
            early.append(position)
    accumulators = compat.accumulators_of(optimizer, [variables[position] for position in late])
    dense = [tf.convert_to_tensor(contributions[position]) for position in late]
    gradients = dict(enumerate(contributions))
    if early:
        with iteration():
            reduced_now = reduce([contributions[position] for position in early])
        gradients.update(zip(early, reduced_now))
    if owners is not None:
        reduce = functools.partial(reduce, owners=[owners[position] for position in late])
    gradients.update(zip(late, _reduced_in_update(optimizer, dense, accumulators, reduce)))
    if owners is not None:
        of_others = []
        for gradient, variable, owner in zip(gradients.values(), variables, owners):
            is_added = gradient is not None and not compat.is_overwritten(variable)
            if is_added and owner != world.rank:
                of_others.append((gradient, variable))
        _accumulate_for_others(optimizer, of_others)
    return list(gradients.values())


def is_update(optimizer: Any) -> tf.Tensor:
    """Return whether the current step of an optimizer that accumulates gradients changes variables: bool, shape []."""
    steps = compat.steps_made(optimizer) + 1
    return tf.equal(steps % compat.accumulation_steps(optimizer), 0)


def _accumulate_for_others(optimizer: Any, pairs: Sequence[tuple[Gradient, Any]]) -> None:
    """Do with gradients and variables what Keras does with those that this rank updates, but for the update itself."""
    accumulators = compat.accumulators_of(optimizer, [variable for _, variable in pairs])

    def add() -> tf.Tensor:
        for (gradient, _), accumulator in zip(pairs, accumulators):
            # By the same operations as in Keras, for the same bits.
            unscaled = _unscaled(optimizer, gradient)
            accumulator.assign(tf.convert_to_tensor(unscaled) + accumulator)
        return tf.constant(False)

    def empty() -> tf.Tensor:
        # Their owners have got all that was in them.
        for accumulator in accumulators:
            accumulator.assign(tf.zeros_like(accumulator))
        return tf.constant(True)

    if accumulators:
        tf.cond(is_update(optimizer), empty, add)


def _unscaled(optimizer: Any, gradient: Any) -> Any:
    scale = optimizer.loss_scale_factor
    if scale is None:
        return gradient
    return gradient / scale


def _choose_for_sparse(
    world: World,
    optimizer: Any,
    contributions: Sequence[Gradient],
    variables: Sequence,
    waits_for_update: dict[int, bool],
) -> None:
    """Let sparse gradients wait for the update if a dense sum has fewer bytes than their rows in all steps."""
    new = []
    rows = []  # 0 where TensorFlow doesn't know it yet
    for contribution, variable in zip(contributions, variables):
        # What a gradient sets, Keras doesn't add up.
        if isinstance(contribution, tf.IndexedSlices) and not compat.is_overwritten(variable):
            inner = compat.inner_variable(variable)
            if id(inner) not in waits_for_update:
                new.append(inner)
                rows.append(contribution.indices.shape[0] or 0)
    if not new:
        return
    # Asked outside of the graph that is traced, since the answer decides what becomes of it.
    with tf.init_scope():
        rows_of_ranks = world.objects(rows, "rows of sparse gradients")
    steps = compat.accumulation_steps(optimizer)
    for variable, rows_by_rank in zip(new, zip(*rows_of_ranks)):
        # Every rank gets the rows of all ranks. A dense sum is sent and received once.
        sparse_rows = steps * sum(rows_by_rank)
        dense_rows = 2 * variable.shape[0]
        waits_for_update[id(variable)] = all(rows_by_rank) and sparse_rows > dense_rows


def _reduced_in_update(
    optimizer: Any, contributions: Sequence[tf.Tensor], accumulators: Sequence, reduce: _Reduce
) -> list[tf.Tensor]:
    """Return gradients for Keras to add to the accumulators, which hold the means in the step of an update."""

    def reduce_sums() -> list[tf.Tensor]:
        sums = []
        for accumulator, contribution in zip(accumulators, contributions):
            # Keras divides before it accumulates.
            unscaled = _unscaled(optimizer, contribution)
            # Read inside the branch: the accumulators must have the values of this step.
            sums.append(accumulator + tf.cast(unscaled, accumulator.dtype))
        with iteration():
            means = reduce(sums)
            for accumulator, mean in zip(accumulators, means):
                if mean is not None:
                    accumulator.assign(mean)
        # Zeros are handed on, since the accumulators have everything already; but not before all ranks have come.
        with tf.control_dependencies([mean for mean in means if mean is not None]):
            return [tf.zeros_like(contribution) for contribution in contributions]

    if not accumulators:
        return []
    gradients = tf.cond(is_update(optimizer), reduce_sums, lambda: list(contributions))
    # ``tf.cond`` returns a list of one tensor as the tensor.
    return tf.nest.flatten(gradients)
