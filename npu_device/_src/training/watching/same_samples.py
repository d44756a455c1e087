"""Ranks of a custom loop that train on the same samples, whose gradients a mean leaves as they are; nothing is sent.

In ``fit`` of a replicated model the data themselves are compared: ``fit/sources``.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from npu_device._src.collectives.job import Job
from npu_device._src.gradients.reduction import Gradient

_log = logging.getLogger("npu_device")

_LOOKS = 3  # looks in a row with the same gradients before the warning
_FEWEST_NUMBERS = 8  # numbers of a gradient; fewer could be the same by chance
_MOST_NUMBERS = 1 << 16
# Part of a gradient's largest number: the sum of more than two ranks is rounded.
_ROUNDING_TOLERANCE = 1e-5


class Pair(NamedTuple):
    """A gradient before and after its reduction; the result is ``scale`` times it if all ranks have the same."""

    gradient: tf.Tensor
    reduced: tf.Tensor
    scale: float


def pair_of(
    gradients: Sequence[Gradient], reduced: Sequence[Gradient], reduction: str, size: int
) -> Pair | None:
    """Return one of some gradients to compare with its reduction: the last one of a moderate size, which
    backward produces first; else the smallest.
    """
    candidates = []
    for position, gradient in enumerate(gradients):
        # Of a divided update, only what this rank has got back can be compared.
        if reduced[position] is None or not isinstance(gradient, tf.Tensor):
            continue
        if gradient.dtype not in (tf.float32, tf.float64):
            continue
        # Unknown dimensions count as no elements: such a gradient isn't compared.
        count = int(gradient.shape.num_elements() or 0)
        if count >= _FEWEST_NUMBERS:
            # The least excess comes first, and of those the last gradient.
            candidates.append((max(0, count - _MOST_NUMBERS), -position))
    if reduction not in ("mean", "sum") or not candidates:
        return None
    position = -min(candidates)[1]
    # The sum of equal gradients is one of them times the number of ranks.
    scale = 1.0
    if reduction != "mean":
        scale = float(size)
    gradient = tf.convert_to_tensor(gradients[position])
    return Pair(gradient, tf.convert_to_tensor(reduced[position]), scale)


class SameSamples:
    """Looks at the gradients of one optimizer until the first difference, on rank 0."""

    def __init__(self, job: Job) -> None:
        self._alike = 0
        self.is_over = job.cluster.rank != 0

    def compare(self, step: int, gradient: np.ndarray, reduced: np.ndarray, scale: float) -> None:
        """Warn if the gradients of all ranks were the same in this look and the two before."""
        largest = np.abs(gradient).max()
        if self.is_over or not largest > 0 or not np.isfinite(largest):
            # NaN ends here, too, since all comparisons with it are false.
            return
        differ = bool(
            np.any(np.abs(scale * gradient - reduced) > _ROUNDING_TOLERANCE * scale * largest)
        )
        self._alike += 1
        self.is_over = differ or self._alike >= _LOOKS
        if differ or not self.is_over:
            return
        remark = ""
        if scale != 1:
            remark = f", and their sum makes steps {scale:g} times too large"
        _log.warning(
            "in step %d, and whenever looked at before, all ranks have computed the very same gradients: they read the "
            "same samples, and train no more than one process would%s.\nLikely cause: the dataset isn't divided among "
            "the ranks.\nWhat to do: dataset, batch = npu.distribute.shard_and_rebatch_dataset(dataset, global_batch), "
            "or let each rank take its part by npu.distribute.rank().",
            step,
            remark,
        )
