"""Dropout in two steps, as Ascend's operators have it: a random mask, and its application. TensorFlow differentiates
the second: the gradient is dropped and scaled where the input was.
"""

from __future__ import annotations

import numbers
from typing import Any

import tensorflow as tf

_ALIGNMENT = 128  # bits: on the NPU, the length of a packed mask is a multiple of this
_BIT_VALUES = (1, 2, 4, 8, 16, 32, 64, 128)


def drop_out_gen_mask(
    shape: Any, prob: Any, seed: int | None = 0, seed2: int | None = 0, name: str | None = None
) -> tf.Tensor:
    """Return a random mask for ``drop_out_do_mask``, one bit an element: a uint8 vector.

    Args:
        shape: of the tensor to drop from; integers or an integer tensor.
        prob: probability to keep, a number or a scalar tensor.
        seed, seed2: the seed. If both are 0 (default) or None, every process draws its own masks.
        name: of the operation.

    The bits are in row-major order, the least significant first, up to a multiple of 128. Source: Ascend operator
    DropOutGenMask.
    """
    with tf.name_scope(name or "DropOutGenMask"):
        count = tf.reduce_prod(tf.cast(shape, tf.int32))
        blocks = (count + _ALIGNMENT - 1) // _ALIGNMENT
        bits = _random_bits(blocks * _ALIGNMENT, prob, seed, seed2)
        # Eight bits make a byte, in which the first element is the lowest bit.
        bytes_of_bits = tf.reshape(tf.cast(bits, tf.int32), [-1, len(_BIT_VALUES)])
        packed = tf.reduce_sum(bytes_of_bits * _BIT_VALUES, axis=1)
        return tf.cast(packed, tf.uint8)


def drop_out_gen_mask_v3(
    shape: Any, prob: Any, seed: int | None = 0, seed2: int | None = 0, name: str | None = None
) -> tf.Tensor:
    """Return a random mask for ``drop_out_do_mask_v3``, one byte an element, 0 or 1: a uint8 vector.

    Args:
        shape, prob, seed, seed2, name: as in ``drop_out_gen_mask``.

    Source: Ascend operator DropOutGenMaskV3.
    """
    with tf.name_scope(name or "DropOutGenMaskV3"):
        count = tf.reduce_prod(tf.cast(shape, tf.int32))
        return tf.cast(_random_bits(count, prob, seed, seed2), tf.uint8)


def drop_out_do_mask(x: Any, mask: Any, keep_prob: Any, name: str | None = None) -> tf.Tensor:
    """Return ``x / keep_prob`` where the mask keeps an element, and 0 elsewhere.

    Args:
        x: floating-point tensor.
        mask: from ``drop_out_gen_mask`` for the shape of ``x``.
        keep_prob: the probability that the mask was made with.
        name: of the operation.

    Source: Ascend operator DropOutDoMask.
    """
    with tf.name_scope(name or "DropOutDoMask"):
        packed = tf.cast(mask, tf.int32)[:, tf.newaxis]
        bits = tf.bitwise.bitwise_and(packed, _BIT_VALUES)
        # The mask has been filled up to a multiple of 128 bits.
        used_bits = tf.reshape(bits, [-1])[: tf.size(x)]
        return drop_out_do_mask_v3(x, used_bits, keep_prob)


def drop_out_do_mask_v3(x: Any, mask: Any, keep_prob: Any, name: str | None = None) -> tf.Tensor:
    """Return ``x / keep_prob`` where the mask keeps an element, and 0 elsewhere.

    Args:
        x, keep_prob, name: as in ``drop_out_do_mask``.
        mask: from ``drop_out_gen_mask_v3`` for the shape of ``x``.

    Source: Ascend operator DropOutDoMaskV3.
    """
    with tf.name_scope(name or "DropOutDoMaskV3"):
        x = tf.convert_to_tensor(x)
        is_kept = tf.reshape(tf.convert_to_tensor(mask) > 0, tf.shape(x))
        if isinstance(keep_prob, numbers.Real):
            divisor = float(keep_prob)
        else:
            divisor = tf.cast(keep_prob, x.dtype)
        y = tf.where(is_kept, x / divisor, tf.zeros([], x.dtype))
        return tf.ensure_shape(y, x.shape)


def _random_bits(count: tf.Tensor, prob: Any, seed: int | None, seed2: int | None) -> tf.Tensor:
    # The raw operation takes both seeds as they are; tf.random.uniform derives one of them from the graph.
    # Scripts without a seed pass None.
    seeds = {"seed": seed or 0, "seed2": seed2 or 0}
    drawn = tf.raw_ops.RandomUniform(shape=[count], dtype=tf.float32, **seeds)
    return drawn < tf.cast(prob, tf.float32)
