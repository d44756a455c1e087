"""``tf.IndexedSlices`` over the ranks: rows gathered, or a dense sum where that moves fewer bytes; and gradients that
may be either, times a number.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from npu_device._src.collectives.call import Agreement
from npu_device._src.collectives.dtypes import reduced_dtype, sum_dtype, wire_dtype
from npu_device._src.collectives.group import Group
from npu_device._src.collectives.moves import gather, gather_ragged
from npu_device._src.collectives.ops import reduce_segments


def reduce_slices(
    agreement: Agreement, slices: tf.IndexedSlices, reduction: str, group: Group, wire: tf.DType | None
) -> tf.IndexedSlices:
    """Return the sum or mean of sparse gradients, of which each rank may have another number of rows.

    The result is the same on every rank. Each rank adds up its own rows of the same index first. When the rows of all
    ranks would move more bytes than the dense tensor, they are taken from the dense sum. ``wire`` is the dtype in which
    float32 and float64 are sent.
    """
    dtype = reduced_dtype(slices.values.dtype, reduction)
    values, indices = _add_up_duplicates(slices.values, slices.indices)

    def gathered() -> tuple[tf.Tensor, tf.Tensor]:
        # One row per index, as in the dense table: a norm over the rows must not depend on how they were reduced.
        everybody = tf.cast(_gather_rows(agreement, values, group, wire), sum_dtype(dtype))
        rows, row_indices = _add_up_duplicates(everybody, gather_ragged(agreement, indices, group))
        return tf.cast(rows / group.size if reduction == "mean" else rows, dtype), row_indices

    if slices.dense_shape is None:
        rows, row_indices = gathered()
    else:
        length = tf.cast(slices.dense_shape[0], tf.int32)

        def dense() -> tuple[tf.Tensor, tf.Tensor]:
            table = tf.math.unsorted_segment_sum(values, indices, length)
            [[total]] = reduce_segments(agreement, [[table]], reduction, group, wire)
            # Not all rows: an optimizer may move those that it is given, even by a gradient of 0.
            present, _ = tf.unique(gather_ragged(agreement, indices, group))
            return tf.gather(total, present), present

        # Every rank knows all ranks' numbers of rows, so all decide alike. A gather sends the longest rank's rows to
        # all others; a ring all-reduce sends the dense tensor twice, less one n-th. Both gather the indices.
        counts = gather(agreement, tf.shape(values)[tf.newaxis, :1], group)
        worth = tf.reduce_max(counts) * group.size > 2 * length
        rows, row_indices = tf.cond(worth, dense, gathered)
        rows.set_shape([None, *slices.values.shape[1:]])
    return tf.IndexedSlices(rows, row_indices, slices.dense_shape)


def gather_slices(
    agreement: Agreement, slices: tf.IndexedSlices, reduction: str, group: Group, wire: tf.DType | None
) -> tf.IndexedSlices:
    """Return the rows of all ranks in the order of the ranks, also those of the same index; see ``reduce_slices``.

    An optimizer that squares each row, as Keras 3's Adam does, then computes what it does for the rows of one process.
    """
    rows = _gather_rows(agreement, slices.values, group, wire)
    if reduction == "mean":
        rows = tf.cast(rows / group.size, reduced_dtype(rows.dtype, reduction))
    return tf.IndexedSlices(rows, gather_ragged(agreement, slices.indices, group), slices.dense_shape)


def require_sparse_reduction(reduction: str) -> None:
    if reduction not in ("sum", "mean"):
        raise ValueError(
            f"reduction {reduction!r} of IndexedSlices is not defined; expected 'sum' or 'mean', or dense tensors "
            "(tf.convert_to_tensor)"
        )


def with_values(gradient: Any, change: Callable[[tf.Tensor], tf.Tensor]) -> Any:
    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(change(gradient.values), gradient.indices, gradient.dense_shape)
    return change(tf.convert_to_tensor(gradient))


def weighted(gradient: Any, weight: Any) -> Any:
    return with_values(gradient, lambda values: values * tf.cast(weight, values.dtype))


def _gather_rows(agreement: Agreement, rows: tf.Tensor, group: Group, wire: tf.DType | None) -> tf.Tensor:
    return tf.cast(gather_ragged(agreement, tf.cast(rows, wire_dtype(rows.dtype, wire)), group), rows.dtype)


def _add_up_duplicates(values: tf.Tensor, indices: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    unique, position = tf.unique(indices)
    return tf.math.unsorted_segment_sum(values, position, tf.size(unique)), unique
