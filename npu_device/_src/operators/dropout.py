"""Dropout by the probability to keep. TensorFlow differentiates it: the same elements of the gradient are dropped."""

from __future__ import annotations

import numbers
from typing import Any

import tensorflow as tf


def dropout(
    x: Any, keep_prob: Any, noise_shape: Any = None, seed: int | None = None, name: str | None = None
) -> tf.Tensor:
    """Return what ``dropout_v3`` returns, in graphs only.

    Args:
        x, keep_prob, noise_shape, seed, name: as in ``dropout_v3``.

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
    """Return ``tf.nn.dropout`` by the probability to keep: kept elements are divided by it, others are 0.

    Args:
        x: floating-point tensor of any shape.
        keep_prob: a number in (0, 1], or a scalar tensor. With the Python float 1.0 the result is ``x``.
        noise_shape: shape of the mask, which is broadcast to ``x``; default the shape of ``x``. None in it stands for
            the length of ``x``.
        seed: Python int; default none. Ranks drop other elements unless it is the same.
        name: of the operation.

    Raises:
        ValueError: ``x`` isn't floating point, or ``keep_prob`` is a number outside (0, 1].

    >>> dropout_v3([1.0, 2.0], keep_prob=1.0).numpy().tolist()
    [1.0, 2.0]

    Source: Ascend TF Adapter 1.15, ``npu_aicore_ops.dropout_v3``.
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
        if isinstance(noise_shape, (list, tuple)):
            actual = tf.shape(x)
            noise_shape = [actual[axis] if length is None else length for axis, length in enumerate(noise_shape)]
        rate = 1 - (keep_prob if isinstance(keep_prob, numbers.Real) else tf.cast(keep_prob, x.dtype))
        return tf.nn.dropout(x, rate, noise_shape, seed)
