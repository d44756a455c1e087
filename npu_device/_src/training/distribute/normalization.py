"""Batch normalization by the samples of all ranks: in steps of ``fit``, in loops of the script, and in a layer for it.

Which layers of a script normalize so is decided in ``synchronized_layers.py``.
"""

from __future__ import annotations

import logging
from typing import Any, Callable

import tensorflow as tf

from npu_device._src import compat
from npu_device._src.collectives.agreed_engine import differentiable_move
from npu_device._src.collectives.dtypes import sum_dtype
from npu_device._src.training.opening.current_world import world_unless_child
from npu_device._src.training.watching.schedule import can_compare, only_building
from npu_device._src.world.current_step import current_step
from npu_device._src.world.world import World

_log = logging.getLogger("npu_device")

Exchange = Callable[[tf.Tensor], tf.Tensor]
"""Returns the sum of all ranks' tensors: floating-point numbers, shape [n]."""

_ROUNDING_TOLERANCE = 1e-5

_UNEVEN_START = (
    "the ranks had different numbers of samples in the first step. Its gradients through synchronized batch "
    "normalization counted all ranks alike; later ones count by samples, since weighted_mean reduces them.\nWhat to "
    "do: begin with the same number of samples on all ranks, or make the step a tf.function."
)


# Moments


def moments(
    exchange: Exchange,
    factor: Any,
    layer: Any,
    inputs: tf.Tensor,
    *axes_or_mask: Any,
    mask: Any = None,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Return mean and variance over the samples of all ranks, with the arguments of the method of Keras's layer.

    ``factor`` is 1, or 0 if the samples of this rank don't count.
    """
    # Keras 3 passes the mask; tf-keras passes the axes and whether to keep their dimensions.
    if len(axes_or_mask) == 2:
        axes, keeps_axes = axes_or_mask
    else:
        axes = compat.reduction_axes(layer)
        keeps_axes = False
    if len(axes_or_mask) == 1:
        [mask] = axes_or_mask
    # Computed in a wide dtype, since 16 bits are too narrow for sums of squares.
    wide = tf.cast(inputs, sum_dtype(inputs.dtype))
    value_weights = tf.cast(factor, wide.dtype)
    if mask is not None:
        # The mask has no axis for the channels.
        masked = tf.cast(mask, wide.dtype)[..., tf.newaxis]
        value_weights *= tf.broadcast_to(masked, tf.shape(wide))
    total = tf.reduce_sum(wide * value_weights, axes, keepdims=True)
    if mask is None:
        # Without a mask, each channel has the same number of values.
        per_total = tf.size(wide) / tf.size(total)
        weight = value_weights * tf.cast(per_total, wide.dtype)
        count = tf.fill(tf.shape(total), weight)
    else:
        count = tf.reduce_sum(value_weights, axes, keepdims=True)

    def of_all_ranks(*sums: tf.Tensor) -> list[tf.Tensor]:
        # One exchange for both sums, since each costs as much as a small call.
        flat = [tf.reshape(tensor, [-1]) for tensor in sums]
        exchanged = exchange(tf.concat(flat, 0))
        pieces = tf.split(exchanged, len(sums))
        return [tf.reshape(piece, tf.shape(total)) for piece in pieces]

    total, count = of_all_ranks(total, count)
    # Numbers of samples have no gradient.
    count = tf.stop_gradient(count)
    mean = tf.math.divide_no_nan(total, count)
    # The spread is taken around the common mean: the difference of mean squares would lose digits. Deviations from the
    # mean add up to 0, so the gradient needn't pass through it once more.
    squares = tf.square(wide - tf.stop_gradient(mean))
    spread = tf.reduce_sum(squares * value_weights, axes, keepdims=True)
    [spread] = of_all_ranks(spread)
    variance = tf.math.divide_no_nan(spread, count)
    if not keeps_axes:
        mean = tf.squeeze(mean, axes)
        variance = tf.squeeze(variance, axes)
    return tf.cast(mean, inputs.dtype), tf.cast(variance, inputs.dtype)


def moments_of_all_ranks(
    layer: Any, group: str, own: Callable, inputs: tf.Tensor, *axes_or_mask: Any, **named: Any
) -> Any:
    """Return mean and variance over the ranks of a group; what ``own`` returns where there is only one process."""
    exchange = exchange_of_layer(group, inputs)
    if exchange is None:
        return own(inputs, *axes_or_mask, **named)
    return moments(exchange, sum_factor(), layer, inputs, *axes_or_mask, **named)


def exchange_of_layer(group: str, inputs: tf.Tensor) -> Exchange | None:
    """Return how the ranks by whose samples a layer normalizes its inputs exchange sums, in a step of ``fit`` or in a
    loop; None if it normalizes by the samples of this process.
    """
    # While a model is only built or saved, other ranks may not be there.
    if compat.is_saving() or only_building.is_on:
        return None
    # Keras itself normalizes over the devices of a strategy of TensorFlow.
    if tf.distribute.get_strategy().num_replicas_in_sync > 1:
        return None
    world = world_unless_child(group)
    if world is None:
        return None
    step = current_step()
    if step is not None:
        return lambda sums: step.exchanged(step.world.sum_over_ranks(step.to_exchange(sums)))
    # A loop of the script says by its reductions how its ranks count.
    return world.job.component_or_new(Loops).exchange(world, tf.shape(inputs)[0])


def sum_factor() -> Any:
    """Return the factor of the sums of this rank: 1, or 0 in a step of ``fit`` on samples that don't count."""
    step = current_step()
    if step is None:
        return 1.0
    return step.sum_factor


class Loops:
    """How the loop of the script combines the gradients of the ranks; a component of the job.

    Each rank differentiates its own loss, and what the ranks exchange gets the gradient of the sum of these losses. If
    gradients are weighted by samples afterwards (``weighted_mean``), that sum is weighted, too. A script is expected to
    do the same in all of its steps.
    """

    def __init__(self) -> None:
        self._by_samples = False
        # The same as ``_by_samples``, as a variable: functions are traced before it is known.
        self._in_graphs: Any = None
        # The ranks' numbers of samples differed in the last eager backward pass.
        self._was_uneven = False
        # Gradients have passed through an exchange, and nothing was reduced since then.
        self._is_open = False

    def note_reduced(self, by_samples: bool) -> None:
        """Note how gradients are reduced."""
        if not self._is_open:
            return
        self._is_open = False
        if by_samples == self._by_samples:
            return
        self._by_samples = by_samples
        if self._in_graphs is not None:
            with tf.init_scope():
                self._in_graphs.assign(by_samples)
        if self._was_uneven and tf.executing_eagerly():
            _log.warning("%s", _UNEVEN_START)

    def exchange(self, world: World, samples: tf.Tensor) -> Exchange:
        """Return how the ranks exchange sums in a step in which this rank has so many samples."""

        def exchange(sums: tf.Tensor) -> tf.Tensor:
            # The number of samples travels with the sums.
            count = tf.reshape(tf.cast(samples, sums.dtype), [1])
            joined = tf.concat([sums, count], 0)
            copy = tf.identity(joined)
            sent = differentiable_move(copy, lambda up: up / factor(), joined)
            total = world.sum_over_ranks(sent)
            fraction = tf.stop_gradient(tf.math.divide_no_nan(count, total[-1:]))
            factor = self._loss_factor(fraction, world)
            copy_of_total = tf.identity(total)
            received = differentiable_move(copy_of_total, lambda up: up * factor(), total)
            return received[:-1]

        return exchange

    def _loss_factor(self, fraction: tf.Tensor, world: World) -> Callable[[], tf.Tensor]:
        """Return what the backward pass calls for the factor of this rank's loss, given its fraction of the samples.

        A rank without samples has a loss that doesn't depend on what is exchanged.
        """
        # A rank without samples mustn't divide by 0.
        equal = tf.ones_like(fraction)
        by_samples = tf.where(fraction > 0, fraction, equal)
        if not tf.executing_eagerly() and can_compare():
            if self._in_graphs is None:
                with tf.init_scope(), tf.device(world.job.device("CPU")):
                    self._in_graphs = compat.plain_variable(self._by_samples)
            # Read before the backward pass: TensorFlow can't build one of a branch that captures a variable itself.
            by_samples = tf.where(self._in_graphs.read_value(), by_samples, equal)

        def factor() -> tf.Tensor:
            self._is_open = True
            if not tf.executing_eagerly():
                return by_samples
            excess = float(by_samples[0]) * world.size - 1
            self._was_uneven = abs(excess) > _ROUNDING_TOLERANCE
            if self._by_samples:
                return by_samples
            return equal

        return factor
