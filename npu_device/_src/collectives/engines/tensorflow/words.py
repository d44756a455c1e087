"""Convert tensors of any dtype to vectors of 32-bit words and back, bit by bit, for data that is only moved; and
lengths to which rows of different lengths are padded, a limited set: TensorFlow keeps something for each length forever
(``keys``).

A tensor of a narrow dtype takes its own number of bytes on the wire, rounded up to whole words.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from npu_device._src.collectives.dtypes import require_bits
from npu_device._src.collectives.shapes import Count


def count(tensor: tf.Tensor) -> Count:
    """Return how many words a tensor takes; an int if its shape is statically known.

    Raises:
        TypeError: its dtype has no bits to send.
    """
    require_bits(tensor.dtype)
    elements = tensor.shape.num_elements()
    return words_for(tf.size(tensor) if elements is None else elements, tensor.dtype)


def words_for(elements: Count, dtype: tf.DType) -> Count:
    """Return how many words a number of elements takes."""
    return -(-elements // (4 // dtype.size)) if dtype.size < 4 else elements * (dtype.size // 4)


def pack(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Return all tensors in one int32 vector, each starting at a whole word."""
    return tf.concat([to_words(tf.reshape(tensor, [1, -1]))[0] for tensor in tensors], axis=0)


def unpack(vector: tf.Tensor, like: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Reverse ``pack``; ``like`` gives the shapes and dtypes."""
    parts = tf.split(vector, [count(tensor) for tensor in like], num=len(like))
    return [from_words_like(part, tensor) for part, tensor in zip(parts, like)]


def from_words_like(vector: tf.Tensor, like: tf.Tensor) -> tf.Tensor:
    """Return one tensor from its words."""
    known = like.shape.num_elements()
    flat = from_words(vector[tf.newaxis], like.dtype, tf.size(like) if known is None else known)
    result = tf.reshape(flat, tf.shape(like) if known is None else like.shape)
    result.set_shape(like.shape)
    return result


def to_words(rows: tf.Tensor) -> tf.Tensor:
    """Convert shape [k, n] of any dtype to int32 of shape [k, words for n], each row starting at a whole word."""
    if rows.dtype == tf.int32:
        return rows
    if rows.dtype.is_bool:
        rows = tf.cast(rows, tf.uint8)
    if rows.dtype.size == 4:
        return tf.bitcast(rows, tf.int32)
    length = tf.shape(rows)[0], rows.shape[1] if rows.shape[1] is not None else tf.shape(rows)[1]
    if rows.dtype.size > 4:
        return tf.reshape(tf.bitcast(rows, tf.int32), [length[0], words_for(length[1], rows.dtype)])
    per_word = 4 // rows.dtype.size
    padded = tf.pad(rows, [[0, 0], [0, -length[1] % per_word]])
    return tf.bitcast(tf.reshape(padded, [length[0], words_for(length[1], rows.dtype), per_word]), tf.int32)


def from_words(words: tf.Tensor, dtype: tf.DType, columns: Count) -> tf.Tensor:
    """Reverse ``to_words``: convert int32 of shape [k, words] to ``dtype`` of shape [k, columns]."""
    if dtype.is_bool:
        return tf.cast(from_words(words, tf.uint8, columns), tf.bool)
    if dtype == tf.int32:
        return words
    if dtype.size == 4:
        return tf.bitcast(words, dtype)
    rows = tf.shape(words)[0]
    if dtype.size > 4:
        return tf.bitcast(tf.reshape(words, [rows, columns, dtype.size // 4]), dtype)
    unpacked = tf.bitcast(words, dtype)
    return tf.reshape(unpacked, [rows, tf.shape(words)[1] * (4 // dtype.size)])[:, :columns]


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
