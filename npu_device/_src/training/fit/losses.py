"""Losses inside a step: each rank's loss is reduced so that the ranks' losses, weighted by their samples, are that of
the whole batch.

A mean over samples needs no change. Sums, means over the valid steps of masked sequences, and means by sample weights
have other denominators.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from functools import partial
from typing import Any, Callable

import tensorflow as tf

from npu_device._src import compat
from npu_device._src.training.fit.replaced import Replaced
from npu_device._src.training.fit.share import Share


class LossesInStep:
    """Stands in for the losses' ``call``, and in Keras 3 the model's ``compute_loss``, while one step of a model runs.

    Args:
        model: the model.
        losses: its loss objects.
        share: this rank's share of the step's samples.
        add_up: adds up a tensor over the ranks.
        replaced: restores them.
    """

    def __init__(
        self,
        model: Any,
        losses: Sequence[Any],
        share: Share,
        add_up: Callable[[tf.Tensor], tf.Tensor],
        replaced: Replaced,
    ) -> None:
        self._share = share
        self._add_up = add_up
        for loss in losses:
            replaced.replace(loss, "call", partial(self._call, loss, loss.reduction))
            replaced.keep(loss, "reduction")
        if compat.is_keras_3(compat.keras_of(model)):
            replaced.replace(model, "compute_loss", _compute_with_masks)

    def _call(self, loss: Any, reduction: Any, own: Callable[..., Any], y_true: Any, y_pred: Any) -> Any:
        values = own(y_true, y_pred)
        out_mask = getattr(values, "_keras_mask", None)  # by ignore_class
        masks = [
            tf.cast(mask, tf.bool) for mask in (getattr(y_pred, "_keras_mask", None), out_mask) if mask is not None
        ]
        mask = functools.reduce(tf.logical_and, masks) if masks else None
        loss.reduction = reduction
        denominator: Any = 1.0
        if reduction not in ("sum", "none", None):
            denominator = self._denominator(reduction, mask, values)
            if denominator is None:
                return values
            # Keras would divide by what is valid on this rank: perhaps by 0.
            loss.reduction = "sum"
        factor = tf.math.divide_no_nan(1.0, tf.cast(denominator * self._share.weight, tf.float32))
        result = values * tf.cast(factor, values.dtype)
        if out_mask is not None:
            result._keras_mask = out_mask
        return result

    def _denominator(self, reduction: str, mask: tf.Tensor | None, values: tf.Tensor) -> tf.Tensor | None:
        """Return by what Keras would divide the sum over the whole batch; None for the number of values."""
        weights = self._sample_weights() if reduction == "mean_with_sample_weight" else None
        if weights is None and mask is None:
            return None
        if weights is None:
            per_step = tf.maximum(tf.size(values) / tf.size(mask), 1.0)  # values for each element of the mask
            return tf.cast(per_step, tf.float32) * self._sum_of_all_ranks(mask)
        weights = tf.cast(weights, tf.float32)
        if mask is not None:
            while weights.shape.rank < mask.shape.rank:
                weights = weights[..., tf.newaxis]
            weights *= tf.cast(mask, tf.float32)
        return self._sum_of_all_ranks(weights)

    def _sample_weights(self) -> Any:
        data = self._share.data
        weights = data[2] if isinstance(data, (tuple, list)) and len(data) > 2 else None
        if tf.nest.is_nested(weights):
            raise ValueError(
                "a loss with reduction 'mean_with_sample_weight' was given sample weights for each output, which a "
                "replicated model can't divide.\nWhat to do: use one weight per sample, or the reduction "
                "'sum_over_batch_size'."
            )
        return weights

    def _sum_of_all_ranks(self, each: tf.Tensor) -> tf.Tensor:
        return self._add_up(tf.reduce_sum(tf.cast(each, tf.float32)) * self._share.counts)


def _compute_with_masks(own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call Keras 3's ``compute_loss``, whose losses cast outputs of another dtype, which then have no mask any more."""
    bound = inspect.signature(own).bind(*args, **kwargs)
    if "y_pred" in bound.arguments:
        bound.arguments["y_pred"] = tf.nest.map_structure(_as_losses_cast, bound.arguments["y_pred"])
    return own(*bound.args, **bound.kwargs)


def _as_losses_cast(output: Any) -> Any:
    mask = getattr(output, "_keras_mask", None)
    if mask is not None and output.dtype.size < 4:
        output = tf.cast(output, tf.float32)
        output._keras_mask = mask
    return output
