"""Compiled losses inside a step: each rank's loss is reduced so that the ranks' losses, weighted by their samples, are
the loss of the whole batch.

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

_MASK = "_npu_mask"


class LossesInStep:
    """Stands in for the losses' ``call``, and the model's ``compute_loss``, while one step of a model runs.

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
        self._casts = compat.is_keras_3(compat.keras_of(model))  # its losses cast outputs, and then have no mask
        for loss in losses:
            replaced.replace(loss, "call", partial(self._call, loss))
        if hasattr(model, "compute_loss"):
            replaced.replace(model, "compute_loss", self._compute)

    def _compute(self, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        bound = inspect.signature(own).bind(*args, **kwargs)
        if "y_pred" in bound.arguments:
            bound.arguments["y_pred"] = tf.nest.map_structure(self._with_some_mask, bound.arguments["y_pred"])
        return own(*bound.args, **bound.kwargs)

    def _with_some_mask(self, output: Any) -> Any:
        """Return a masked output with a mask by which Keras can divide, if this rank has no valid step."""
        mask = getattr(output, "_keras_mask", None)
        if mask is None:
            return output
        copy = tf.cast(output, tf.float32) if self._casts and output.dtype.size < 4 else tf.identity(output)
        setattr(copy, _MASK, mask)
        copy._keras_mask = _not_empty(mask, mask)
        return copy

    def _call(self, loss: Any, own: Callable[..., Any], y_true: Any, y_pred: Any) -> Any:
        values = own(y_true, y_pred)
        out = getattr(values, "_keras_mask", None)  # by ignore_class
        masks = [getattr(y_pred, _MASK, getattr(y_pred, "_keras_mask", None)), out]
        masks = [tf.cast(mask, tf.bool) for mask in masks if mask is not None]
        mask = functools.reduce(tf.logical_and, masks) if masks else None
        factor = self._factor(loss, mask)
        result = values if factor is None else values * tf.cast(factor, values.dtype)
        if out is not None and result is not values:
            result._keras_mask = _not_empty(out, mask)
        return result

    def _factor(self, loss: Any, mask: tf.Tensor | None) -> tf.Tensor | None:
        """Return the factor of this rank's loss before it is weighted by its samples; None for none."""
        reduction = str(loss.reduction)
        if reduction in ("sum", "none", "None"):
            return tf.math.divide_no_nan(1.0, tf.cast(self._share.weight, tf.float32))
        data = self._share.data
        if reduction != "mean_with_sample_weight" or not isinstance(data, (tuple, list)) or len(data) < 3:
            return None if mask is None else self._relative(mask)
        if tf.nest.is_nested(data[2]):
            raise ValueError(
                "a loss with reduction 'mean_with_sample_weight' was given sample weights for each output, which a "
                "replicated model can't divide.\nWhat to do: use one weight per sample, or the reduction "
                "'sum_over_batch_size'."
            )
        if mask is None:
            return self._relative(data[2])
        weights = tf.cast(data[2], tf.float32)
        while weights.shape.rank < mask.shape.rank:
            weights = weights[..., tf.newaxis]
        return self._relative(weights * tf.cast(mask, tf.float32))

    def _relative(self, denominator: Any) -> tf.Tensor:
        """Return this rank's part of all ranks' denominator, relative to its part of the samples."""
        mine = tf.reduce_sum(tf.cast(denominator, tf.float32)) * self._share.counts
        part = tf.math.divide_no_nan(mine, self._add_up(mine))
        return tf.math.divide_no_nan(part, tf.cast(self._share.weight, tf.float32))


def _not_empty(mask: Any, valid: Any) -> tf.Tensor:
    """Return a mask; of ones if nothing is valid. The factor is 0 then."""
    return tf.logical_or(tf.cast(mask, tf.bool), tf.logical_not(tf.reduce_any(tf.cast(valid, tf.bool))))
