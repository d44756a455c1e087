"""Batch normalisation inside a step: layers with ``synchronized=True`` normalise by the samples of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Callable

import tensorflow as tf

from npu_device._src.training.fit.replaced import Replaced
from npu_device._src.training.fit.share import Share


def synchronise(
    layers: Sequence[Any], share: Share, add_up: Callable[[tf.Tensor], tf.Tensor], replaced: Replaced
) -> None:
    """Replace the part of synchronised layers that computes mean and variance, while one step of a model runs.

    Args:
        layers: of the model.
        share: this rank's share of the step's samples.
        add_up: adds up a tensor over the ranks.
        replaced: restores them.
    """

    def of_all_ranks(inputs: Any, axes: Any, keep: bool, mask: Any) -> tuple[tf.Tensor, tf.Tensor]:
        wide = tf.cast(inputs, tf.float32) if inputs.dtype.size < 4 else inputs
        if mask is None:
            weight = tf.cast(share.weight, wide.dtype)
            mean, variance = tf.nn.moments(wide, list(axes), keepdims=keep)
        else:
            valid = tf.cast(mask, wide.dtype)
            count = tf.reduce_sum(valid) * tf.cast(share.counts, wide.dtype)
            weight = tf.math.divide_no_nan(count, add_up(count))
            # Without a valid step, the moments of all steps, with weight 0: else they would be NaN.
            steps = tf.where(tf.reduce_any(valid > 0), valid, tf.ones_like(valid))[..., tf.newaxis]
            mean, variance = tf.nn.weighted_moments(wide, list(axes), steps, keepdims=keep)
        common = add_up(mean * weight)
        # Around the common mean: the difference of mean squares would lose digits.
        spread = add_up((variance + tf.square(mean - common)) * weight)
        return tf.cast(common, inputs.dtype), tf.cast(spread, inputs.dtype)

    def moments(layer: Any, own: Callable[..., Any], inputs: Any, *rest: Any, mask: Any = None) -> Any:
        # Keras 3 passes the mask; tf-keras passes the axes and whether to keep their dimensions.
        axes, keep = rest if len(rest) == 2 else (layer._reduction_axes, False)
        mask = rest[0] if len(rest) == 1 else mask
        return of_all_ranks(inputs, axes, keep, mask)

    for layer in layers:
        name = "_sync_calculate_mean_and_var" if hasattr(layer, "_sync_calculate_mean_and_var") else "_moments"
        if getattr(layer, "synchronized", False) and hasattr(layer, name):
            replaced.replace(layer, name, partial(moments, layer))
