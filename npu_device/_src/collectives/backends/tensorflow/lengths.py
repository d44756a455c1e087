"""Lengths to which rows of different lengths are padded: a limited set.

TensorFlow keeps something for each length forever (``sequence``).
"""

from __future__ import annotations

import tensorflow as tf

_LARGEST = 1 << 62


def _lengths() -> list[int]:
    """Return eight lengths for each power of two: a row grows by an eighth at most."""
    found, step = [0], 1
    while found[-1] < _LARGEST:
        found.extend(range(found[-1] + step, 16 * step + 1, step))
        step *= 2
    return found


_table = _lengths()


def rounded(length: tf.Tensor) -> tf.Tensor:
    """Return the next length of the set: int32 or int64, shape [], not below the given one."""
    table = tf.constant([entry for entry in _table if entry <= length.dtype.max], length.dtype)
    return table[tf.searchsorted(table, length[tf.newaxis])[0]]
