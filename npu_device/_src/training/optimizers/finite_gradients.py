"""Gradients that aren't finite: an error that names the ranks and variables, or a sign for a loss-scale optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from npu_device._src.collectives.graph import call_now
from npu_device._src.collectives.moves import all_gather
from npu_device._src.gradients.reduction import Gradient, all_finite, dense_tensors, with_values
from npu_device._src.training.watching.digests import SHOWN_RANKS, SHOWN_VARIABLES, variable_name
from npu_device._src.wording import shortened
from npu_device._src.world.world import World


def checked(
    world: World,
    steps: Any,
    own_gradients: Sequence[Gradient],
    reduced: Sequence[Gradient],
    variables: Sequence,
) -> list[Gradient]:
    """Return the reduced gradients; if they aren't finite, raise RuntimeError, which names the ranks, on all."""
    names = []
    for gradient, variable in zip(own_gradients, variables):
        if gradient is not None:
            names.append(variable_name(variable))

    def report() -> tf.Tensor:
        own_faults = list(map(_fault_of, dense_tensors(own_gradients)))
        faults_of_ranks = all_gather(world.job, tf.stack(own_faults), world.group)

        def tell(faults_of_ranks: Any, steps: Any) -> list:
            faults = faults_of_ranks.reshape(world.size, -1)
            raise RuntimeError(_text(world, int(steps), names, faults))

        spec = tf.TensorSpec([], tf.int64)
        [returned] = call_now(tell, [faults_of_ranks, steps], [spec])
        return returned

    # Only after a fault do the ranks exchange which gradients have it.
    are_finite = all_finite(reduced)
    good = tf.cond(are_finite, lambda: tf.constant(0, tf.int64), report)
    # Waited for, or variables would be updated before the error.
    with tf.control_dependencies([good]):
        return [with_values(gradient, tf.identity) for gradient in reduced]


def _fault_of(values: tf.Tensor) -> tf.Tensor:
    """Return 0 if values are finite, 1 if some are infinite, 2 if some are NaN: int32, shape []."""
    has_nan = tf.reduce_any(tf.math.is_nan(values))
    is_finite = tf.reduce_all(tf.math.is_finite(values))
    return tf.where(has_nan, 2, tf.where(is_finite, 0, 1))


def _text(world: World, steps: int, names: Sequence[str], faults: np.ndarray) -> str:
    rows = {}
    for rank, row in zip(world.group.ranks, faults):
        faults_of_rank = []
        for name, fault in zip(names, row):
            if fault:
                faults_of_rank.append(f"{name} ({'NaN' if fault == 2 else 'infinite'})")
        if faults_of_rank:
            rows[rank] = shortened(faults_of_rank, SHOWN_VARIABLES, "more variables")
    cluster = world.job.cluster
    # Finite gradients of all ranks may add up to more than their dtype holds.
    failures = "  those of each rank are; their sum is not"
    if rows:
        failures = "\n".join(cluster.lines(rows, SHOWN_RANKS))
    return (
        f"rank {cluster.rank}: the gradients of step {steps + 1} are not finite, and no variable was changed by them.\n"
        f"{failures}\n"
        "Likely cause: a bad sample in the data of that rank, a division by zero or log of zero in the loss, or a "
        "learning rate that is too high.\n"
        "What to do: look at the batch of that rank in this step; clip the gradients. With 16-bit floats use a "
        "loss-scale optimizer, which skips such steps."
    )
