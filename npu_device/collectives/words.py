"""Tensors of mixed dtypes as one vector of 32-bit words, and back, bit by bit: what broadcast sends."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf


def count(tensor: tf.Tensor) -> int:
    """How many words a tensor takes.

    Raises:
        ValueError: its shape is not statically known.
        TypeError: its dtype has no bits to send.
    """
    elements = tensor.shape.num_elements()
    if elements is None:
        raise ValueError(
            f"a tensor of shape {tensor.shape} was given; its shape must be known before it can be broadcast"
        )
    if not (tensor.dtype.is_floating or tensor.dtype.is_integer or tensor.dtype.is_complex or tensor.dtype.is_bool):
        raise TypeError(
            f"a tensor of dtype {tensor.dtype.name} can't be sent to another rank; expected a numeric dtype or bool"
        )
    return -(-elements * tensor.dtype.size // 4)


def pack(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """All tensors in one int32 vector, each starting at a whole word."""
    return tf.concat([_to_words(tensor) for tensor in tensors], axis=0)


def unpack(vector: tf.Tensor, like: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """The reverse of ``pack``; ``like`` gives the shapes and dtypes."""
    parts = tf.split(vector, [count(tensor) for tensor in like])
    return [_from_words(part, tensor) for part, tensor in zip(parts, like)]


def _to_words(tensor: tf.Tensor) -> tf.Tensor:
    flat = tf.reshape(tensor, [-1])
    if flat.dtype.is_bool:
        flat = tf.cast(flat, tf.uint8)
    if flat.dtype == tf.int32:
        return flat
    if flat.dtype.size >= 4:
        return tf.reshape(tf.bitcast(flat, tf.int32), [-1])
    per_word = 4 // flat.dtype.size
    flat = tf.pad(flat, [[0, -flat.shape[0] % per_word]])
    return tf.bitcast(tf.reshape(flat, [-1, per_word]), tf.int32)


def _from_words(part: tf.Tensor, like: tf.Tensor) -> tf.Tensor:
    dtype = tf.uint8 if like.dtype.is_bool else like.dtype
    if dtype.size > 4:
        part = tf.reshape(part, [-1, dtype.size // 4])
    flat = part if dtype == tf.int32 else tf.reshape(tf.bitcast(part, dtype), [-1])
    flat = flat[: like.shape.num_elements()]
    return tf.cast(tf.reshape(flat, like.shape), like.dtype)
