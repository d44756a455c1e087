"""Sharded updates: each rank updates its share of the variables and sends them to the others; the optimizer's state is
sharded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Callable

import numpy as np
import tensorflow as tf

from npu_device._src.collectives.graph import after, fetchable
from npu_device._src.training.world import world_unless_child

VARIABLES_OF_ONE_RANK = "npu_device/variables_of_one_rank"
"""Collection of a session's graph: the optimizer state for the share of this rank, which the other ranks don't have."""


@tf.autograph.experimental.do_not_convert
def grouping_gradients_apply(apply_func: Callable[..., Any], grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
    """Apply the share of this rank in the gradients, then give every rank all variables.

    Args:
        apply_func: called with the (gradient, variable) pairs of this rank; ``apply_gradients`` of an optimizer for
            instance.
        grads_and_vars: all pairs, the same on every rank, with gradients that have been reduced already.
        args: passed on to ``apply_func``.
        kwargs: passed on to ``apply_func``.

    Returns:
        On several ranks ``None``, or in a graph for a session the operation that does it all; in a tf.function the
        updates run with the function. On a single device the result of ``apply_func`` for all pairs.

    Raises:
        ValueError: there are fewer variables than ranks; or ``apply_func`` is that of a Keras optimizer which needs all
            gradients at once (``global_clipnorm``, ``LossScaleOptimizer``).
        RuntimeError: as for ``broadcast``.

    The variables are cut into one contiguous share per rank, of about the same number of bytes, and each rank keeps
    only its share of the state of the optimizer. Every rank has to make the call.

    Source: Ascend TF Adapter 2.x, ``npu.distribute.grouping_gradients_apply``.
    """
    ranks = world_unless_child()
    if ranks is None:
        return apply_func(grads_and_vars, *args, **kwargs)
    _refuse_what_needs_all_gradients(getattr(apply_func, "__self__", None), ranks.rank)
    pairs = list(grads_and_vars)
    variables = [variable for _, variable in pairs]
    mine = shares(variables, ranks.size)[ranks.rank]
    before = len(tf.compat.v1.global_variables())
    applied = apply_func([pairs[position] for position in mine], *args, **kwargs)
    for variable in tf.compat.v1.global_variables()[before:]:  # none but in a session's graph
        tf.compat.v1.add_to_collection(VARIABLES_OF_ONE_RANK, variable)
    with after(applied):
        return grouping_broadcast(variables)


def _refuse_what_needs_all_gradients(optimizer: Any, rank: int) -> None:
    found, remedy = "scales the loss", "use the optimizer inside it, or apply the gradients on every rank"
    if clips := getattr(optimizer, "global_clipnorm", None) is not None:
        found = "clips by global_clipnorm"
        remedy = "clip the reduced gradients by tf.clip_by_global_norm first, with an optimizer that doesn't clip"
    if clips or hasattr(optimizer, "inner_optimizer"):
        raise ValueError(
            f"rank {rank}: this {type(optimizer).__name__} {found}, for which it needs all gradients; "
            "grouping_gradients_apply gives each rank's only those of its share, so that the ranks would differ.\n"
            f"What to do: {remedy}."
        )


@tf.autograph.experimental.do_not_convert
def grouping_broadcast(variables: Any) -> Any:
    """Overwrite each variable with the value of the rank whose share it is in.

    Args:
        variables: variables of the same number, shapes and dtypes on every rank.

    Returns:
        On several ranks ``None``, and in a graph for a session the operation that does it; ``variables`` on a single
        device.

    Raises:
        ValueError: there are fewer variables than ranks.
        RuntimeError: as for ``broadcast``.

    Source: Ascend TF Adapter 2.x, ``npu.distribute.grouping_broadcast``.
    """
    ranks = world_unless_child()
    if ranks is None:
        return variables
    variables = list(variables)
    sent = [
        ranks.assign_from_root([variables[position] for position in share], owner)
        for owner, share in enumerate(shares(variables, ranks.size))
    ]
    return fetchable(sent)


def shares(variables: Sequence[Any], count: int) -> list[range]:
    """Cut a list of variables into ``count`` runs of neighbours of about the same number of bytes, none empty."""
    if len(variables) < count:
        raise ValueError(
            f"the update of {len(variables)} variable(s) can't be divided among {count} ranks; expected at least one "
            "variable per rank.\n"
            "What to do: apply the gradients on every rank with the optimizer itself."
        )
    # Scalars weigh nothing, as on Ascend.
    weights = [tf.as_dtype(v.dtype).size * int(np.prod(v.shape)) if len(v.shape) else 0 for v in variables]
    total, before, start = sum(weights), 0, 0
    runs = []
    for run in range(count):
        end, left = start + 1, count - run - 1
        before += weights[start]
        while end < len(variables) - left and (not left or before + weights[end] / 2 <= total * (run + 1) / count):
            before += weights[end]
            end += 1
        runs.append(range(start, end))
        start = end
    return runs
