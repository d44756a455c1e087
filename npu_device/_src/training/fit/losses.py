"""Compiled losses inside a step: each rank's loss is reduced so that the ranks' losses, weighted by their samples, are
the loss of the whole batch.

A mean over samples needs no change. Sums, means over the valid steps of masked sequences, and means by sample weights
have other denominators.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Callable

import tensorflow as tf

from npu_device._src.training.fit.replaced import Replaced
from npu_device._src.training.fit.share import Share


class LossesInStep:
    """Stands in for the compiled losses' ``call`` while one step of a model runs.

    Args:
        losses: the compiled loss objects.
        share: this rank's share of the step's samples.
        add_up: adds up a tensor over the ranks.
        replaced: restores them.
    """

    def __init__(
        self, losses: Sequence[Any], share: Share, add_up: Callable[[tf.Tensor], tf.Tensor], replaced: Replaced
    ) -> None:
        self._share = share
        self._add_up = add_up
        for loss in losses:
            replaced.replace(loss, "call", partial(self._call, loss))

    def _call(self, loss: Any, own: Callable[..., Any], y_true: Any, y_pred: Any) -> Any:
        factor = self._factor(loss, y_pred)
        values = own(y_true, y_pred)
        return values if factor is None else _keep_mask(values, values * tf.cast(factor, values.dtype))

    def _factor(self, loss: Any, y_pred: Any) -> tf.Tensor | None:
        """Return the factor of this rank's loss before it is weighted by its samples; None for none."""
        reduction = str(loss.reduction)
        if reduction in ("sum", "none", "None"):
            return tf.math.divide_no_nan(1.0, tf.cast(self._share.weight, tf.float32))
        mask = getattr(y_pred, "_keras_mask", None)
        data = self._share.data
        if reduction == "mean_with_sample_weight" and isinstance(data, (tuple, list)) and len(data) > 2:
            return self._relative(data[2])
        return None if mask is None else self._relative(mask)

    def _relative(self, denominator: Any) -> tf.Tensor:
        """Return this rank's part of all ranks' denominator, relative to its part of the samples."""
        if tf.nest.is_nested(denominator):
            raise ValueError(
                "a loss with reduction 'mean_with_sample_weight' was given sample weights for each output, which a "
                "replicated model can't divide.\nWhat to do: use one weight per sample, or the reduction "
                "'sum_over_batch_size'."
            )
        mine = tf.reduce_sum(tf.cast(denominator, tf.float32)) * self._share.counts
        part = tf.math.divide_no_nan(mine, self._add_up(mine))
        return tf.math.divide_no_nan(part, tf.cast(self._share.weight, tf.float32))


def _keep_mask(before: Any, after: Any) -> Any:
    if getattr(before, "_keras_mask", None) is not None:
        after._keras_mask = before._keras_mask
    return after
