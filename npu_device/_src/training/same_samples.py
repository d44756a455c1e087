"""Ranks of a custom loop that train on the same samples: their gradients are the same, or their data sets are shuffled
differently before they are divided. (``fit`` of a replicated model compares the data themselves: ``fit/sources``.)

Nothing is sent: after a mean over the ranks, gradients that were the same everywhere are still what they were.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from npu_device._src import compat
from npu_device._src.collectives.graph import call_now
from npu_device._src.collectives.job import Job
from npu_device._src.gradients.reduction import Gradient
from npu_device._src.training.same_variables import can_compare

_log = logging.getLogger("npu_device")

_STEPS = 3  # in a row with the same gradients before the warning
_FEWEST_NUMBERS = 8  # of a gradient; fewer could be the same by chance
_ROUNDING = 1e-5  # of a gradient's largest number: the sum of more than two ranks is rounded
_OVER = -1


@functools.cache
def _count() -> tf.Variable:
    """Return a variable, the number of steps in a row whose gradients were the same; ``_OVER`` once that is known."""
    with tf.init_scope(), tf.device("CPU:0"):
        return compat.plain_variable(tf.constant(0), name="npu_device_same_samples")


def watch(runtime: Job, mine: Sequence[Gradient], reduced: Sequence[Gradient]) -> None:
    """Warn on rank 0 if in the first steps the gradients of all ranks are the same.

    Args:
        runtime: the running cluster.
        mine: this rank's gradients.
        reduced: their mean over all ranks.

    Comparing one small gradient until the first difference is all that it costs.
    """
    if runtime.cluster.rank or not can_compare():
        return
    sizes = {place: size for place, gradient in enumerate(mine) if (size := _size(gradient)) >= _FEWEST_NUMBERS}
    if not sizes:
        return
    place = min(sizes, key=lambda place: sizes[place])
    one, mean = (tf.convert_to_tensor(gradients[place]) for gradients in (mine, reduced))
    with tf.init_scope():
        if int(_count()) == _OVER:
            return
    count = _count()

    def look() -> tf.Tensor:
        size = tf.reduce_max(tf.abs(one))
        alike = tf.reduce_all(tf.abs(one - mean) <= tf.cast(_ROUNDING, one.dtype) * size)
        number = tf.where(size > 0, tf.where(alike, before + 1, _OVER), before)
        return tf.cond(tf.equal(number, _STEPS), lambda: _tell(number), lambda: number)

    with tf.device("CPU:0"):
        before = tf.convert_to_tensor(count)
        count.assign(tf.cond(before >= 0, look, lambda: before))


def _size(gradient: Gradient) -> int:
    """Return the number of elements of a gradient that can be compared; else 0."""
    if not isinstance(gradient, tf.Tensor) or gradient.dtype not in (tf.float32, tf.float64):
        return 0
    return int(gradient.shape.num_elements() or 0)


def _tell(number: tf.Tensor) -> tf.Tensor:
    def tell(_: Any) -> list[Any]:
        _log.warning(
            "in the first %d steps all ranks have computed the very same gradients: they read the same samples, and "
            "train no more than one process would.\nLikely cause: the data set isn't divided among the ranks.\nWhat to "
            "do: dataset, batch = npu.distribute.shard_and_rebatch_dataset(dataset, global_batch), or let each rank "
            "take its part by npu.distribute.rank().",
            _STEPS,
        )
        return [np.int32(_OVER)]

    return call_now(tell, [number], [tf.TensorSpec([], tf.int32)])[0]


def warn_if_shuffled_differently(runtime: Job, dataset: Any) -> None:
    """Warn on rank 0 if a data set that is about to be divided is shuffled without a seed, so on each rank differently.

    The ranks would then read some samples twice and others never.
    """
    if runtime.cluster.rank == 0 and compat.is_shuffled_without_seed(dataset):
        _log.warning(
            "shard_and_rebatch_dataset was given a data set that is shuffled in another order on each rank: some "
            "samples are read by several ranks, others by none.\nWhat to do: call shuffle after "
            "shard_and_rebatch_dataset, or give it a seed, the same on every rank."
        )
