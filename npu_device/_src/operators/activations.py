"""Ascend's activations as TensorFlow operations: the fast gelus, gelu by tanh, PReLU, and centralization.

Gradients come from TensorFlow's differentiation of the formulas. ``npu.ops.gelu`` is in ``gelu.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

# The sigmoid in place of the normal distribution's integral: Hendrycks and Gimpel 2016, section 2.
SLOPE = 1.702
# The parabola in place of erf, and the position of its top: Kim et al. 2021 (I-BERT), equation 8.
_PARABOLA, _TOP = -0.2888, 1.769


def fast_gelu(x: Any, name: str | None = None) -> tf.Tensor:
    """Return ``x * sigmoid(1.702 * x)``, with its gradient.

    Args:
        x: floating-point tensor of any shape.
        name: of the operation.

    Returns:
        A tensor of the shape and dtype of ``x``.

    Other ranks see nothing. Source: Ascend operator FastGelu.

    >>> float(fast_gelu([0.0])[0])
    0.0
    """
    with tf.name_scope(name or "FastGelu"):
        x = tf.convert_to_tensor(x)
        return x * tf.sigmoid(SLOPE * x)


def fast_gelu_grad(dy: Any, x: Any, name: str | None = None) -> tf.Tensor:
    """Return the gradient of ``fast_gelu`` with respect to ``x``, times ``dy``.

    Args:
        dy: gradient of the result; shape and dtype of ``x``.
        x: what ``fast_gelu`` was given.
        name: of the operation.

    Returns:
        A tensor of the shape and dtype of ``x``.

    Other ranks see nothing. Source: Ascend operator FastGeluGrad.
    """
    with tf.name_scope(name or "FastGeluGrad"):
        x = tf.convert_to_tensor(x)
        gate = tf.sigmoid(SLOPE * x)
        return dy * (gate + SLOPE * x * gate * (1 - gate))


def fast_gelu_v2(x: Any, name: str | None = None) -> tf.Tensor:
    """Return gelu with a parabola in place of erf: ``x/2 * (1 + sign(x) * (a * (min(|x|/sqrt(2), b) - b)**2 + 1))``,
    with a = -0.2888 and b = 1.769; at most 0.02 from gelu. Arguments and result are as for ``fast_gelu``.

    Other ranks see nothing. Source: Ascend operator FastGeluV2; Kim et al. 2021, I-BERT.
    """
    with tf.name_scope(name or "FastGeluV2"):
        x = tf.convert_to_tensor(x)
        clipped = tf.minimum(tf.abs(x) * 0.5**0.5, _TOP)
        erf = tf.sign(x) * (_PARABOLA * tf.square(clipped - _TOP) + 1)
        return 0.5 * x * (1 + erf)


def tanh_gelu(x: Any, name: str | None = None) -> tf.Tensor:
    """Return gelu in its tanh form, ``x/2 * (1 + tanh(sqrt(2/pi) * (x + 0.044715 * x**3)))``, with its gradient.
    Arguments and result are as for ``fast_gelu``.

    Other ranks see nothing. Source: Ascend TF Adapter 1.15, ``npu_unary_ops.gelu``.
    """
    return tf.nn.gelu(x, approximate=True, name=name)


def prelu(x: Any, weight: Any, name: str | None = None) -> tf.Tensor:
    """Return ``x`` where it is positive and ``weight * x`` elsewhere, with gradients for both.

    Args:
        x: floating-point tensor, channels last.
        weight: one number, or one for each channel; dtype of ``x``.
        name: of the operation.

    Returns:
        A tensor of the shape and dtype of ``x``.

    Other ranks see nothing. Source: Ascend TF Adapter 1.15, ``npu_aicore_ops.prelu``.

    >>> prelu([-2.0, 2.0], 0.5).numpy().tolist()
    [-1.0, 2.0]
    """
    with tf.name_scope(name or "PRelu"):
        x = tf.convert_to_tensor(x)
        return tf.nn.relu(x) - weight * tf.nn.relu(-x)


def centralization(x: Any, axes: Sequence[int] | int = (-1,), name: str | None = None) -> tf.Tensor:
    """Return ``x`` less its mean over ``axes``, with its gradient.

    Args:
        x: floating-point tensor of any shape.
        axes: what to average over; default the last axis.
        name: of the operation.

    Returns:
        A tensor of the shape and dtype of ``x``.

    Other ranks see nothing. Source: Ascend TF Adapter 1.15, ``npu_aicore_ops.centralization``.

    >>> centralization([1.0, 3.0]).numpy().tolist()
    [-1.0, 1.0]
    """
    with tf.name_scope(name or "Centralization"):
        x = tf.convert_to_tensor(x)
        return x - tf.reduce_mean(x, axis=axes, keepdims=True)
