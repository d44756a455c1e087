"""``tf.IndexedSlices`` over the ranks: rows gathered, or a dense sum where that moves fewer bytes."""

from __future__ import annotations

import tensorflow as tf

from npu_device.cluster.runtime import Runtime
from npu_device.collectives.all_gather import all_gather
from npu_device.collectives.all_gather_v import all_gather_v
from npu_device.collectives.all_reduce import all_reduce
from npu_device.collectives.group import Group


def reduce_slices(runtime: Runtime, slices: tf.IndexedSlices, reduction: str, group: Group) -> tf.IndexedSlices:
    """Sum or mean of sparse gradients.

    Args:
        runtime: the running cluster.
        slices: values of shape [rows, …] with each rank's own number of rows; the rest of the shape, and
            ``dense_shape``, are the same everywhere.
        reduction: ``"sum"`` or ``"mean"``.
        group: the group, of which this rank is a member.

    Returns:
        Rows whose sum by index is the result, the same on every rank. Each rank adds up its own rows of the same index
        first. When everybody's rows together move more bytes than the dense tensor would, the rows are those of the
        dense sum.

    Raises:
        ValueError: another reduction.
    """
    if reduction not in ("sum", "mean"):
        raise ValueError(
            f"reduction {reduction!r} of IndexedSlices is not defined; expected 'sum' or 'mean', or dense tensors "
            "(tf.convert_to_tensor)"
        )
    values, indices = _add_up_duplicates(slices.values, slices.indices)

    def gathered() -> tuple[tf.Tensor, tf.Tensor]:
        # One row an index, as in the dense table: a norm over the rows must not depend on the road.
        return _add_up_duplicates(all_gather_v(runtime, values, group), all_gather_v(runtime, indices, group))

    if slices.dense_shape is None:
        rows, row_indices = gathered()
    else:
        length = tf.cast(slices.dense_shape[0], tf.int32)

        def dense() -> tuple[tf.Tensor, tf.Tensor]:
            table = tf.math.unsorted_segment_sum(values, indices, length)
            return all_reduce(runtime, table, "sum", group), tf.range(slices.dense_shape[0], dtype=indices.dtype)

        # Every rank knows everybody's number of rows, and so decides alike. A gather sends the longest rank's rows to
        # all others; a ring all-reduce sends the dense tensor twice, less one n-th.
        counts = all_gather(runtime, tf.shape(values, tf.int64)[:1], group)
        row_bytes = tf.reduce_prod(tf.shape(values, tf.int64)[1:]) * values.dtype.size
        gather_bytes = tf.reduce_max(counts) * (row_bytes + indices.dtype.size)
        dense_bytes = 2 * tf.cast(length, tf.int64) * row_bytes // group.size
        worth = gather_bytes > dense_bytes
        rows, row_indices = tf.cond(worth, dense, gathered)
        rows.set_shape([None, *slices.values.shape[1:]])
    if reduction == "mean":
        rows = rows / tf.cast(group.size, rows.dtype)
    return tf.IndexedSlices(rows, row_indices, slices.dense_shape)


def _add_up_duplicates(values: tf.Tensor, indices: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    unique, position = tf.unique(indices)
    return tf.math.unsorted_segment_sum(values, position, tf.size(unique)), unique
