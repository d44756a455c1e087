"""Which dtypes can be reduced, which can be moved, and of which dtype a mean is."""

from __future__ import annotations

import tensorflow as tf

REDUCED = (
    tf.float16,
    tf.bfloat16,
    tf.float32,
    tf.float64,
    tf.int8,
    tf.int16,
    tf.int32,
    tf.int64,
    tf.uint8,
    tf.uint16,
    tf.uint32,
    tf.uint64,
)


def mean_dtype(dtype: tf.DType) -> tf.DType:
    """The dtype of a mean, as ``tf.divide`` has it."""
    if dtype.is_floating:
        return dtype
    return tf.float32 if dtype.size < 4 else tf.float64


def require_bits(dtype: tf.DType) -> None:
    """Refuse to move what isn't made of bits of a fixed number.

    Raises:
        TypeError: strings, resources and the like.
    """
    if not (dtype.is_floating or dtype.is_integer or dtype.is_complex or dtype.is_bool):
        raise TypeError(
            f"a tensor of dtype {dtype.name} can't be sent to another rank; expected a numeric dtype or bool"
        )
