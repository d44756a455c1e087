"""The checksum of the batches that a rank has read, by which the ranks notice that they read different ones.

The first batch is compared as a whole (``start.full_checksum``).
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

_SAMPLE = 4096
"""Elements of a tensor that count, at equal distances; those of a smaller tensor all count."""


class RunningChecksum:
    """Two ranks' checksums are equal if they were given the same batches in the same order, except by chance."""

    def __init__(self) -> None:
        # In a variable, so that steps add to it in graphs, without handing every batch to Python.
        self._checksum = tf.Variable(0, dtype=tf.int64, trainable=False)

    def add(self, batch: Any) -> None:
        """Add a batch: nested tensors, dense, sparse or ragged, and ``None``. May be called in a graph."""
        self._checksum.assign(checksum_of(batch, self._checksum.read_value()))

    def pop(self) -> int:
        """Return the checksum, and begin anew."""
        checksum = int(self._checksum)
        self._checksum.assign(0)
        return checksum


def checksum_of(batch: Any, begin: Any = 0) -> Any:
    """Return the checksum of nested tensors, an int64 of shape [], beginning with another one's."""
    checksum = begin
    for leaf in tf.nest.flatten(batch, expand_composites=True):
        if leaf is not None:
            checksum = checksum * 31 + _checksum(tf.convert_to_tensor(leaf))
    return tf.cast(checksum, tf.int64)


def _checksum(tensor: tf.Tensor) -> tf.Tensor | int:
    """Return an int64 of shape []; 0 for a dtype without values that can be read."""
    dtype = tensor.dtype
    is_number = dtype.is_floating or dtype.is_integer or dtype.is_bool
    if not is_number and dtype != tf.string:
        return 0
    flat = tf.reshape(tensor, [-1])
    # Elements are skipped, since reading all of a large batch would cost more than the step of a small model.
    distance = tf.maximum(tf.size(flat) // _SAMPLE, 1)
    flat = flat[::distance]
    if flat.dtype == tf.string:
        flat = tf.strings.to_hash_bucket_fast(flat, 1 << 31)
    elif flat.dtype.is_floating:
        # The bits are summed, so that values that are nearly equal have different checksums. Of float64, the last bits
        # are lost.
        flat = tf.bitcast(tf.cast(flat, tf.float32), tf.int32)
    # Each value counts with a weight of its position, so that the order counts.
    weights = 2 * tf.range(tf.size(flat, tf.int64)) + 1
    return tf.reduce_sum(tf.cast(flat, tf.int64) * weights)
