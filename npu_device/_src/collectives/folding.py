"""Reduce the rows of a tensor to one row, in order, as the shared-memory backend does with numpy."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import tensorflow as tf

from npu_device._src.collectives.dtypes import mean_dtype, sum_dtype

_TOTALS = {"sum": tf.add, "mean": tf.add, "prod": tf.multiply}
_CHOICES = {"min": tf.reduce_min, "max": tf.reduce_max}


def fold(rows: Sequence[tf.Tensor], reduction: str) -> tf.Tensor:
    """Return the reduction of rows, one per rank. 16-bit floats are combined in float32 and rounded once."""
    dtype = rows[0].dtype
    if reduction in _CHOICES:
        return _CHOICES[reduction](tf.stack(rows), axis=0)
    if reduction == "mean":
        dtype = mean_dtype(dtype)
    total = reduce(_TOTALS[reduction], [tf.cast(row, sum_dtype(dtype)) for row in rows])
    return tf.cast(total / len(rows) if reduction == "mean" else total, dtype)
