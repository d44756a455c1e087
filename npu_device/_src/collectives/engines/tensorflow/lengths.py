"""Lengths to which rows of different lengths are padded: a limited set.

TensorFlow keeps something for each length forever (``keys``).
"""

from __future__ import annotations

import functools

import numpy as np
import tensorflow as tf

_LARGEST = 1 << 62
_SHORT = 1 << 12
"""Elements. The time of a transfer hardly depends on the length of a shorter row."""


def _lengths() -> list[int]:
    """Return the powers of two for short rows. For longer ones, return eight lengths for each power of two: such a row
    grows by an eighth at most.
    """
    found = [0, *(1 << power for power in range(_SHORT.bit_length()))]
    while found[-1] < _LARGEST:
        step = found[-1] // 8
        found.extend(range(found[-1] + step, 2 * found[-1] + 1, step))
    return found


@functools.cache
def _table(dtype: tf.DType) -> np.ndarray:
    largest = dtype.max
    return np.array([*(length for length in _lengths() if length < largest), largest], dtype.as_numpy_dtype)


def rounded(length: tf.Tensor) -> tf.Tensor:
    """Return the next length of the set: int32 or int64, shape [], not below the given one."""
    table = tf.constant(_table(length.dtype))
    return table[tf.searchsorted(table, length[tf.newaxis])[0]]
