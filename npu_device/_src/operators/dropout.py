"""Dropout as Ascend's operators have it, by the probability to keep: in one step (``dropout``, ``dropout_v3``) or in
two, a mask and its application.

A mask only fits the other operation of its pair. Gradients come from TensorFlow's differentiation: the same elements of
the gradient are dropped, and the others scaled.
"""

from __future__ import annotations

import numbers
from typing import Any

import tensorflow as tf

from npu_device._src.operators.scalars import scalar

# The mask of drop_out_gen_mask holds one bit per element, and as on the NPU its length is a multiple of this.
_MASK_BITS = 128


def dropout(
    x: Any, keep_prob: Any, noise_shape: Any = None, seed: int | None = None, name: str | None = None
) -> tf.Tensor:
    """Do the same as ``dropout_v3``, in graphs only.

    Args:
        x, keep_prob, noise_shape, seed, name: as in ``dropout_v3``.

    Returns:
        What ``dropout_v3`` returns.

    Raises:
        RuntimeError: called eagerly.
        ValueError: as in ``dropout_v3``.

    Source: Ascend TF Adapter 1.15, ``npu_ops.dropout``.
    """
    if tf.executing_eagerly():
        raise RuntimeError(
            "npu_ops.dropout was called eagerly; on Ascend it works in graphs only.\n"
            "What to do: call it in a tf.function or a TensorFlow 1 graph, or use tf.nn.dropout(x, rate=1 - keep_prob)."
        )
    return dropout_v3(x, keep_prob, noise_shape, seed, name)


def dropout_v3(
    x: Any, keep_prob: Any, noise_shape: Any = None, seed: int | None = None, name: str | None = None
) -> tf.Tensor:
    """Apply ``tf.nn.dropout`` by the probability to keep: kept elements are divided by it, others are 0.

    Args:
        x: floating-point tensor of any shape.
        keep_prob: a number in (0, 1], or a scalar tensor. With the Python float 1.0 the result is ``x``.
        noise_shape: shape of the mask, which is broadcast to ``x``; default the shape of ``x``. None in it stands for
            the length of ``x``.
        seed: Python int; default none.
        name: of the operation.

    Returns:
        A tensor of the shape and dtype of ``x``.

    Raises:
        ValueError: ``x`` isn't floating point, or ``keep_prob`` is a number outside (0, 1].

    Other ranks see nothing, and drop other elements unless the seed is the same. Source: Ascend TF Adapter 1.15,
    ``npu_aicore_ops.dropout_v3``.

    >>> dropout_v3([1.0, 2.0], keep_prob=1.0).numpy().tolist()
    [1.0, 2.0]
    """
    with tf.name_scope(name or "dropout"):
        x = tf.convert_to_tensor(x)
        if not x.dtype.is_floating:
            raise ValueError(
                f"dropout was given a tensor of {x.dtype.name}, expected a floating-point one, because what is kept is "
                "scaled.\nWhat to do: tf.cast it first."
            )
        if isinstance(keep_prob, numbers.Real) and not 0 < float(keep_prob) <= 1:
            raise ValueError(
                f"dropout was given keep_prob {keep_prob}, expected a number above 0 and not above 1.\n"
                "Likely cause: the rate was passed; keep_prob is 1 - rate."
            )
        if isinstance(keep_prob, float) and keep_prob == 1.0:
            return x
        kept = tf.random.uniform(_mask_shape(x, noise_shape), seed=seed) < scalar(keep_prob, tf.float32)
        return _apply(x, kept, keep_prob)


def drop_out_gen_mask(shape: Any, prob: Any, seed: int = 0, seed2: int = 0, name: str | None = None) -> tf.Tensor:
    """Return a random mask for ``drop_out_do_mask``, one bit per element.

    Args:
        shape: of the tensor to drop from; integers or an integer tensor.
        prob: probability to keep, a number or a scalar tensor.
        seed, seed2: the seed; both 0 (default) give other masks in every process.
        name: of the operation.

    Returns:
        uint8 vector: bits of the elements in row-major order, the least significant first, up to a multiple of 128.

    Other ranks see nothing. Source: Ascend operator DropOutGenMask.
    """
    with tf.name_scope(name or "DropOutGenMask"):
        count = _aligned(tf.reduce_prod(tf.cast(shape, tf.int32)))
        kept = tf.reshape(_kept(count, prob, seed, seed2), [-1, 8])
        return tf.cast(tf.reduce_sum(tf.cast(kept, tf.int32) * _bit_values(), axis=1), tf.uint8)


def drop_out_gen_mask_v3(shape: Any, prob: Any, seed: int = 0, seed2: int = 0, name: str | None = None) -> tf.Tensor:
    """Return a random mask for ``drop_out_do_mask_v3``; the arguments are those of ``drop_out_gen_mask``.

    Args:
        shape, prob, seed, seed2, name: as in ``drop_out_gen_mask``.

    Returns:
        uint8 vector of 0 and 1 for the elements in row-major order.

    Other ranks see nothing. Source: Ascend operator DropOutGenMaskV3.
    """
    with tf.name_scope(name or "DropOutGenMaskV3"):
        return tf.cast(_kept(tf.reduce_prod(tf.cast(shape, tf.int32)), prob, seed, seed2), tf.uint8)


def drop_out_do_mask(x: Any, mask: Any, keep_prob: Any, name: str | None = None) -> tf.Tensor:
    """Return ``x / keep_prob`` where the mask says keep, 0 elsewhere, with its gradient.

    Args:
        x: floating-point tensor.
        mask: from ``drop_out_gen_mask`` for the shape of ``x``.
        keep_prob: the probability that the mask was made with.
        name: of the operation.

    Returns:
        A tensor of the shape and dtype of ``x``.

    Other ranks see nothing. Source: Ascend operator DropOutDoMask.
    """
    with tf.name_scope(name or "DropOutDoMask"):
        x = tf.convert_to_tensor(x)
        bits = tf.bitwise.bitwise_and(tf.cast(mask, tf.int32)[:, tf.newaxis], _bit_values())
        return _apply(x, tf.reshape(tf.reshape(bits, [-1])[: tf.size(x)] > 0, tf.shape(x)), keep_prob)


def drop_out_do_mask_v3(x: Any, mask: Any, keep_prob: Any, name: str | None = None) -> tf.Tensor:
    """Do the same as ``drop_out_do_mask``, with a mask from ``drop_out_gen_mask_v3``.

    Args:
        x, keep_prob, name: as in ``drop_out_do_mask``.
        mask: the result of ``drop_out_gen_mask_v3``.

    Returns:
        A tensor of the shape and dtype of ``x``.

    Other ranks see nothing. Source: Ascend operator DropOutDoMaskV3.
    """
    with tf.name_scope(name or "DropOutDoMaskV3"):
        x = tf.convert_to_tensor(x)
        return _apply(x, tf.reshape(tf.convert_to_tensor(mask) > 0, tf.shape(x)), keep_prob)


def _apply(x: tf.Tensor, kept: tf.Tensor, keep_prob: Any) -> tf.Tensor:
    dropped = tf.where(kept, x / scalar(keep_prob, x.dtype), tf.zeros([], x.dtype))
    dropped.set_shape(x.shape)
    return dropped


def _kept(count: tf.Tensor, prob: Any, seed: int, seed2: int) -> tf.Tensor:
    # The raw operation takes both seeds as they are; tf.random.uniform derives one of them from the graph.
    drawn = tf.raw_ops.RandomUniform(shape=[count], dtype=tf.float32, seed=seed, seed2=seed2)
    return drawn < scalar(prob, tf.float32)


def _aligned(count: tf.Tensor) -> tf.Tensor:
    return (count + _MASK_BITS - 1) // _MASK_BITS * _MASK_BITS


def _bit_values() -> tf.Tensor:
    return tf.constant([1, 2, 4, 8, 16, 32, 64, 128])


def _mask_shape(x: tf.Tensor, noise_shape: Any) -> Any:
    if noise_shape is None:
        return tf.shape(x)
    if isinstance(noise_shape, (list, tuple)):
        actual = tf.shape(x)
        return tf.stack([actual[axis] if length is None else length for axis, length in enumerate(noise_shape)])
    return noise_shape
