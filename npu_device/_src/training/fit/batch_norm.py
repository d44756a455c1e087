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
        if mask is not None:
            return of_valid(wide, list(axes), keep, tf.cast(mask, wide.dtype)[..., tf.newaxis], inputs.dtype)
        weight = tf.cast(share.weight, wide.dtype)
        mean, variance = tf.nn.moments(wide, list(axes), keepdims=keep)
        common = add_up(mean * weight)
        # Around the common mean: the difference of mean squares would lose digits.
        spread = add_up((variance + tf.square(mean - common)) * weight)
        return tf.cast(common, inputs.dtype), tf.cast(spread, inputs.dtype)

    def of_valid(wide: Any, axes: list[int], keep: bool, valid: Any, dtype: Any) -> tuple[tf.Tensor, tf.Tensor]:
        valid = tf.ones_like(wide) * valid * tf.cast(share.counts, wide.dtype)
        count = add_up(tf.reduce_sum(valid, axes, keepdims=True))
        mean = tf.math.divide_no_nan(add_up(tf.reduce_sum(wide * valid, axes, keepdims=True)), count)
        squares = add_up(tf.reduce_sum(tf.square(wide - mean) * valid, axes, keepdims=True))
        found = [tf.cast(each, dtype) for each in (mean, tf.math.divide_no_nan(squares, count))]
        mean, variance = found if keep else [tf.squeeze(each, axes) for each in found]
        return mean, variance

    def moments(layer: Any, own: Callable[..., Any], inputs: Any, *rest: Any, mask: Any = None) -> Any:
        # Keras 3 passes the mask; tf-keras passes the axes and whether to keep their dimensions.
        axes, keep = rest if len(rest) == 2 else (layer._reduction_axes, False)
        mask = rest[0] if len(rest) == 1 else mask
        return of_all_ranks(inputs, axes, keep, mask)

    for layer in layers:
        name = "_sync_calculate_mean_and_var" if hasattr(layer, "_sync_calculate_mean_and_var") else "_moments"
        if getattr(layer, "synchronized", False) and hasattr(layer, name):
            replaced.replace(layer, name, partial(moments, layer))
