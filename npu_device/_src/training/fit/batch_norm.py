"""Batch normalisation inside a step: layers with ``synchronized=True`` normalise by the samples of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Callable

import tensorflow as tf

from npu_device._src import compat
from npu_device._src.training.fit.current import CurrentStep
from npu_device._src.training.world import World

if TYPE_CHECKING:
    from npu_device._src.training.fit.step import Replaced


def synchronise(layers: Sequence[Any], step: CurrentStep, world: World, replaced: Replaced) -> None:
    """Replace the part of synchronised layers that computes mean and variance, while one step of a model runs."""
    for layer in layers:
        name = compat.moments_method(layer)
        if hasattr(layer, name):
            replaced.replace(layer, name, partial(moments, step, world, layer))


def moments(
    step: Any, world: World, layer: Any, own: Callable[..., Any], inputs: Any, *rest: Any, mask: Any = None
) -> Any:
    """Return mean and variance over all ranks, in place of the layer's ``own`` method.

    Args:
        step: a ``CurrentStep``, or what has its ``weight``, ``counts``, ``to_exchange`` and ``exchanged``.
        rest: what the Keras passes after the inputs.
    """
    del own
    # Keras 3 passes the mask; tf-keras passes the axes and whether to keep their dimensions.
    axes, keep = rest if len(rest) == 2 else (compat.reduction_axes(layer), False)
    mask = rest[0] if len(rest) == 1 else mask
    wide = tf.cast(inputs, tf.float32) if inputs.dtype.size < 4 else inputs
    if mask is None:
        part = tf.cast(step.weight, wide.dtype)
        mean, variance = tf.nn.moments(wide, list(axes), keepdims=keep)
    else:
        valid = tf.cast(mask, wide.dtype)
        count = tf.reduce_sum(valid) * tf.cast(step.counts, wide.dtype)
        part = tf.math.divide_no_nan(count, world.add_up(count))
        # Without a valid step, the moments of all steps, with part 0: else they would be NaN.
        steps = tf.where(tf.reduce_any(valid > 0), valid, tf.ones_like(valid))[..., tf.newaxis]
        mean, variance = tf.nn.weighted_moments(wide, list(axes), steps, keepdims=keep)

    def of_all_ranks(value: tf.Tensor) -> tf.Tensor:
        return step.exchanged(world.add_up(step.to_exchange(value * part)))

    common = of_all_ranks(mean)
    # Around the common mean: the difference of mean squares would lose digits.
    spread = of_all_ranks(variance + tf.square(mean - common))
    return tf.cast(common, inputs.dtype), tf.cast(spread, inputs.dtype)
