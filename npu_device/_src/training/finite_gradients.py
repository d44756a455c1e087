"""The check of gradients on request (``NPU_DEVICE_CHECK_GRADIENTS``): which rank's aren't finite, in which variable.

NaN and infinity survive a sum. The reduced gradients, which are the same on every rank, show whether there are any, and
the ranks exchange something only then. Steps of a loss-scale optimizer, which skips such gradients, are left alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from npu_device._src import environment
from npu_device._src.collectives.graph import call_now
from npu_device._src.collectives.moves import all_gather
from npu_device._src.gradients.reduction import Gradient, dense_of
from npu_device._src.training.digests import SHOWN_RANKS, SHOWN_VARIABLES, variable_name
from npu_device._src.training.loss_scale_optimizer import all_finite
from npu_device._src.training.world import World


def is_wanted(optimizer: Any) -> bool:
    """Return True if the gradients that an optimizer applies are to be checked."""
    return environment.NPU_DEVICE_CHECK_GRADIENTS.get() == "on" and not hasattr(optimizer, "inner_optimizer")


def checked(
    world: World, steps: Any, mine: Sequence[Gradient], reduced: Sequence[Gradient], variables: Sequence[Any]
) -> list[Gradient]:
    """Return the reduced gradients, or raise RuntimeError on every rank if they aren't finite: it says whose gradients,
    and of which variables, were the cause. ``mine`` are those of this rank.
    """
    present = [place for place, gradient in enumerate(mine) if gradient is not None]
    names = [variable_name(variables[place]) for place in present]

    def report() -> tf.Tensor:
        kinds = tf.stack([_kind(mine[place]) for place in present])
        everybody = all_gather(world.job, kinds, world.group)

        def tell(everybody: Any, steps: Any) -> list[Any]:
            raise RuntimeError(_text(world, int(steps), names, everybody.reshape(world.size, -1)))

        return call_now(tell, [everybody, steps], [tf.TensorSpec([], tf.int64)])[0]

    good = tf.cond(all_finite(reduced), lambda: tf.constant(0, tf.int64), report)
    with tf.control_dependencies([good]):  # or variables would be updated before the error
        return [
            None if one is None else tf.nest.map_structure(tf.identity, one, expand_composites=True) for one in reduced
        ]


def _kind(gradient: Any) -> tf.Tensor:
    """Return 0 if a gradient is finite, 1 if it is infinite, 2 if it has NaN: int32, shape []."""
    values = dense_of(gradient)
    nan = tf.reduce_any(tf.math.is_nan(values))
    return tf.where(nan, 2, tf.where(tf.reduce_all(tf.math.is_finite(values)), 0, 1))


def _text(world: World, steps: int, names: Sequence[str], kinds: np.ndarray) -> str:
    ranks, cluster = world.group.ranks, world.job.cluster
    bad = [place for place in range(world.size) if kinds[place].any()]
    lines = cluster.lines({ranks[place]: _row(names, kinds[place]) for place in bad}, SHOWN_RANKS)
    found = "\n".join(lines) if bad else "  those of each rank are; their sum is not"
    return (
        f"rank {cluster.rank}: the gradients of step {steps + 1} are not finite, and no variable was changed by them.\n"
        f"{found}\n"
        "Likely cause: a bad sample in the data of that rank, a division by zero or log of zero in the loss, or a "
        "learning rate that is too high.\n"
        "What to do: look at the batch of that rank in this step; clip the gradients. With 16-bit floats use a "
        "loss-scale optimizer, which skips such steps."
    )


def _row(names: Sequence[str], kinds: np.ndarray) -> str:
    parts = [f"{name} ({'NaN' if kind == 2 else 'infinite'})" for name, kind in zip(names, kinds) if kind]
    more = f" and {len(parts) - SHOWN_VARIABLES} more variables" if len(parts) > SHOWN_VARIABLES else ""
    return ", ".join(parts[:SHOWN_VARIABLES]) + more
