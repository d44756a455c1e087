"""Ascend's layer norm, which also returns mean and variance, and its gradient as an operation of its own."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


def layer_norm(
    x: Any,
    gamma: Any,
    beta: Any,
    begin_norm_axis: int = 0,
    begin_params_axis: int = 0,
    epsilon: float = 1e-7,
    name: str | None = None,
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Return ``gamma * (x - mean) / sqrt(variance + epsilon) + beta``, differentiable by ``x``, ``gamma``, ``beta``.

    Args:
        x: floating-point tensor of known rank.
        gamma, beta: scale and offset, of the shape ``x.shape[begin_params_axis:]`` and the dtype of ``x``.
        begin_norm_axis: mean and variance are taken over this axis and those behind it; default all of them.
        begin_params_axis: first axis of ``gamma`` and ``beta``; default 0.
        epsilon: added to the variance; default 1e-7.
        name: of the operation.

    Returns:
        The normalised tensor; the mean and the variance, with 1 in the place of the axes averaged over. All have the
        dtype of ``x``; 16-bit tensors are averaged in float32.

    Other ranks see nothing. Source: Ascend operator LayerNorm.
    """
    with tf.name_scope(name or "LayerNorm"):
        x = tf.convert_to_tensor(x)
        wide = _widened(x)
        axes = list(range(begin_norm_axis % x.shape.rank, x.shape.rank))
        trailing = tf.shape(x)[begin_params_axis:]
        mean = tf.reduce_mean(wide, axes, keepdims=True)
        # Not tf.nn.moments: TensorFlow 2.20's graph optimizer would replace everything by a fused layer norm with
        # another epsilon, and drop the mean although it is fetched. Can go when that rewrite respects both.
        variance = tf.reduce_mean(tf.square(wide - mean), axes, keepdims=True)
        normalised = (wide - mean) * tf.math.rsqrt(variance + epsilon)
        y = normalised * _parameter(gamma, trailing, wide.dtype) + _parameter(beta, trailing, wide.dtype)
        return tf.cast(y, x.dtype), tf.cast(mean, x.dtype), tf.cast(variance, x.dtype)


def layer_norm_grad(
    dy: Any, x: Any, variance: Any, mean: Any, gamma: Any, epsilon: float = 1e-7, name: str | None = None
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Return the gradients of ``layer_norm`` with respect to ``x``, ``gamma`` and ``beta``.

    Args:
        dy: gradient of the normalised tensor; shape and dtype of ``x``.
        x, gamma, epsilon: what ``layer_norm`` was given.
        variance, mean: as ``layer_norm`` gave them.
        name: of the operation.

    Returns:
        Gradients for ``x``, ``gamma`` and ``beta``, in their shapes and the dtype of ``x``.

    Other ranks see nothing. Source: Ascend operator LayerNormGrad.
    """
    with tf.name_scope(name or "LayerNormGrad"):
        x, gamma = tf.convert_to_tensor(x), tf.convert_to_tensor(gamma)
        mean = tf.convert_to_tensor(mean)
        wide, dy, scale = _widened(x), _widened(dy), _widened(gamma)
        # Averaged axes are those where the mean has length 1; where x has length 1 too it makes no difference.
        axes = [axis for axis, length in enumerate(mean.shape) if length == 1]
        batch = list(range(x.shape.rank - gamma.shape.rank))
        inverse = tf.math.rsqrt(_widened(variance) + epsilon)
        normalised = (wide - _widened(mean)) * inverse
        scaled = dy * scale
        dx = inverse * (
            scaled
            - tf.reduce_mean(scaled, axes, keepdims=True)
            - normalised * tf.reduce_mean(scaled * normalised, axes, keepdims=True)
        )
        dgamma = tf.reduce_sum(dy * normalised, batch)
        dbeta = tf.reduce_sum(dy, batch)
        return tf.cast(dx, x.dtype), tf.cast(dgamma, x.dtype), tf.cast(dbeta, x.dtype)


def _widened(tensor: Any) -> tf.Tensor:
    tensor = tf.convert_to_tensor(tensor)
    return tf.cast(tensor, tf.float32) if tensor.dtype.size < 4 else tensor


def _parameter(value: Any, shape: Any, dtype: Any) -> tf.Tensor:
    return tf.reshape(tf.cast(value, dtype), shape)
