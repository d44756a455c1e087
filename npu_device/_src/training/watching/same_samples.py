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

_LOOKS = 3  # in a row with the same gradients before the warning
_FEWEST_NUMBERS = 8  # of a gradient; fewer could be the same by chance
_MOST_NUMBERS = 1 << 16
_ROUNDING = 1e-5  # of a gradient's largest number: the sum of more than two ranks is rounded


class Pair(NamedTuple):
    """A gradient before and after its reduction; the result is ``scale`` times it if all ranks have the same."""

    mine: tf.Tensor
    reduced: tf.Tensor
    scale: float


def pair_of(
    mine: Sequence[Gradient], reduced: Sequence[Gradient], kind: str, size: int
) -> Pair | None:
    """Return one of some gradients to compare with its reduction: among those of a moderate size the last one, which
    backward produces first; else the smallest.
    """
    numbers = [
        int(one.shape.num_elements() or 0) if isinstance(one, tf.Tensor) else 0 for one in mine
    ]
    excess = [
        (max(0, count - _MOST_NUMBERS), -place)
        for place, (count, one) in enumerate(zip(numbers, mine))
        if count >= _FEWEST_NUMBERS and one is not None and one.dtype in (tf.float32, tf.float64)
    ]
    if kind not in ("mean", "sum") or not excess:
        return None
    place = -min(excess)[1]
    scale = 1.0 if kind == "mean" else float(size)
    return Pair(tf.convert_to_tensor(mine[place]), tf.convert_to_tensor(reduced[place]), scale)


class SameSamples:
    """Looks at the gradients of one optimizer until the first difference, on rank 0."""

    def __init__(self, job: Job) -> None:
        self._alike = 0
        self.is_over = job.cluster.rank != 0

    def compare(self, step: int, mine: np.ndarray, reduced: np.ndarray, scale: float) -> None:
        """Warn if the gradients of all ranks were the same in this look and the two before."""
        largest = np.abs(mine).max()
        if self.is_over or not largest > 0 or not np.isfinite(largest):
            return
        differ = bool(np.any(np.abs(scale * mine - reduced) > _ROUNDING * scale * largest))
        self._alike += 1
        self.is_over = differ or self._alike >= _LOOKS
        if differ or not self.is_over:
            return
        much = "" if scale == 1 else f", and their sum makes steps {scale:g} times too large"
        _log.warning(
            "in step %d, and whenever looked at before, all ranks have computed the very same gradients: they read the "
            "same samples, and train no more than one process would%s.\nLikely cause: the dataset isn't divided among "
            "the ranks.\nWhat to do: dataset, batch = npu.distribute.shard_and_rebatch_dataset(dataset, global_batch), "
            "or let each rank take its part by npu.distribute.rank().",
            step,
            much,
        )
