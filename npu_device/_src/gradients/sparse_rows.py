"""``tf.IndexedSlices``: the rows of all ranks, or sums of them, gathered or taken from a dense sum.

In one process, the gradient of a table has a row for each time that the batch looks it up. What computes with rows (the
norm of a gradient, an optimizer of Keras 3 that squares each) must see those rows, so they are gathered as they are.
Sums move fewer bytes, and are right where rows of one index are added up next anyway.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from npu_device._src.collectives.agreed_engine import AgreedEngine
from npu_device._src.collectives.dtypes import Wire, reduced_dtype, sum_dtype, wire_dtype
from npu_device._src.collectives.graph import origin
from npu_device._src.collectives.moves import gather_ragged, spec_with_first_dimension

# By type, the output that has no number twice. Lookups with a combiner use these operations: one row for each index, in
# one process for each of the whole batch.
_DISTINCT = {"Unique": 0, "UniqueV2": 0}
_DISTINCT.update({f"SparseSegment{name}GradV2": 1 for name in ("Sum", "Mean", "SqrtN")})

RowsAndIndices = tuple[tf.Tensor, tf.Tensor]


class TableRows:
    """The lookups in a table that a gradient has rows of, as the graph tells.

    The rows may be gathered elsewhere: a session gives eager tensors, which have no graph. Rows of an eager gradient
    count as one lookup.

    Attributes:
        are_distinct: of each lookup, whether it has one row for each index.
        counts: rows of each lookup on this rank, if some ranks' rows are to be added up; else None.
    """

    def __init__(self, indices: Any) -> None:
        self.counts: tf.Tensor | None = None
        lookups = list(_lookups(indices))
        self.are_distinct = [is_distinct for _, is_distinct in lookups]
        if any(self.are_distinct):
            # Counts tell the other ranks where the rows of one lookup end.
            self.counts = tf.stack([tf.size(rows) for rows, _ in lookups])

    def gathered(
        self,
        engine: AgreedEngine,
        slices: tf.IndexedSlices,
        reduction: str,
        wire: Wire,
        counts: Iterator[tf.Tensor],
    ) -> tf.IndexedSlices:
        """Return the sum or mean as the rows that one process has. Of ``counts`` it takes its own, if it has any."""
        dtype = reduced_dtype(slices.dtype, reduction)
        rows = _gathered_rows(engine, slices.values, wire, dtype)
        indices = gather_ragged(engine, slices.indices)
        if self.counts is not None:
            rows, indices = self._in_order_of_lookups(engine, rows, indices, next(counts))
        if reduction == "mean":
            rows = rows / engine.group.size
        return tf.IndexedSlices(tf.cast(rows, dtype), indices, slices.dense_shape)

    def _in_order_of_lookups(
        self, engine: AgreedEngine, rows: tf.Tensor, indices: tf.Tensor, own_counts: tf.Tensor
    ) -> RowsAndIndices:
        """Return the rows of all ranks by lookup, added up where a lookup has one for each index."""
        lookups = len(self.are_distinct)
        # The counts stand by rank, then by lookup.
        counts = tf.reshape(engine.gather(own_counts[tf.newaxis]), [-1])
        row_runs = tf.split(rows, counts, num=engine.group.size * lookups)
        index_runs = tf.split(indices, counts, num=engine.group.size * lookups)
        merged_rows = []
        merged_indices = []
        for lookup, is_distinct in enumerate(self.are_distinct):
            lookup_rows = tf.concat(row_runs[lookup::lookups], 0)
            # Runs of one lookup are as far apart as there are lookups.
            lookup_indices = tf.concat(index_runs[lookup::lookups], 0)
            if is_distinct:
                lookup_rows, lookup_indices = add_up_duplicates(lookup_rows, lookup_indices)
            merged_rows.append(lookup_rows)
            merged_indices.append(lookup_indices)
        return tf.concat(merged_rows, 0), tf.concat(merged_indices, 0)


def _lookups(indices: Any) -> Iterator[tuple[Any, bool]]:
    """Generate the indices of each lookup whose rows follow each other, and whether there is one row for each index."""
    tensor = indices
    while tf.is_symbolic_tensor(tensor):
        tensor = origin(tensor)
        if tensor.op.type == "ConcatV2":
            for joined in tensor.op.inputs[:-1]:
                yield from _lookups(joined)
            return
        if tensor.op.type not in ("Reshape", "Cast"):
            break
        tensor = tensor.op.inputs[0]
    # An operation such as Unique has several outputs; only one of them has each number once.
    is_distinct = tf.is_symbolic_tensor(tensor) and (
        _DISTINCT.get(tensor.op.type) == tensor.value_index
    )
    yield indices, is_distinct


def add_up_slices(
    engine: AgreedEngine, slices: tf.IndexedSlices, reduction: str, wire: Wire
) -> tf.IndexedSlices:
    """Return the sum or mean of sparse gradients with one row for each index, whichever way they travel.

    The result is the same on every rank. Each rank adds up its own rows of the same index first. When the rows of all
    ranks would move more bytes than the dense tensor, they are taken from the dense sum.
    """
    dtype = reduced_dtype(slices.values.dtype, reduction)
    size = engine.group.size
    own_rows, own_indices = add_up_duplicates(slices.values, slices.indices)

    def gathered() -> RowsAndIndices:
        # One row per index, as in the dense table: a norm over the rows must not depend on how they were reduced.
        all_rows = _gathered_rows(engine, own_rows, wire, dtype)
        rows, row_indices = add_up_duplicates(all_rows, gather_ragged(engine, own_indices))
        if reduction == "mean":
            rows = rows / size
        return tf.cast(rows, dtype), row_indices

    # Without a length, there is no dense tensor to compare with.
    if slices.dense_shape is None:
        return tf.IndexedSlices(*gathered())
    length = tf.cast(slices.dense_shape[0], tf.int32)

    def dense() -> RowsAndIndices:
        table = _sums_of_rows(own_rows, own_indices, length)
        [[total]] = engine.all_reduce([[table]], reduction, wire)
        # Only picked rows are sent: an optimizer may move any row that it gets, even by a gradient of 0.
        gathered_indices, _ = tf.unique(gather_ragged(engine, own_indices))
        return tf.gather(total, gathered_indices), gathered_indices

    # Every rank knows all ranks' numbers of rows, so all decide alike. A gather sends the longest rank's rows to all
    # others; a ring all-reduce sends the dense tensor twice, less one n-th. Both gather the indices.
    counts = engine.gather(tf.shape(own_rows)[tf.newaxis, :1])
    rows, row_indices = tf.cond(tf.reduce_max(counts) * size > 2 * length, dense, gathered)
    rows.set_shape(spec_with_first_dimension(slices.values, lambda _: None).shape)
    return tf.IndexedSlices(rows, row_indices, slices.dense_shape)


def _gathered_rows(engine: AgreedEngine, rows: tf.Tensor, wire: Wire, dtype: tf.DType) -> tf.Tensor:
    """Return the rows of all ranks in the dtype in which results of another one are added up."""
    # The rows have fewer bits only while they travel.
    sent = tf.cast(rows, wire_dtype(rows.dtype, wire))
    return tf.cast(gather_ragged(engine, sent), sum_dtype(dtype))


def add_up_duplicates(rows: tf.Tensor, indices: tf.Tensor) -> RowsAndIndices:
    """Add up the rows of each index, in their order; return them with the indices, each of which is there once."""
    unique, position = tf.unique(indices)
    return _sums_of_rows(rows, position, tf.size(unique)), unique


def _sums_of_rows(rows: tf.Tensor, places: tf.Tensor, count: Any) -> tf.Tensor:
    """Return for each place the sum of its rows, in their order: TensorFlow's GPUs add up in any order."""
    with tf.device("CPU:0"):
        return tf.math.unsorted_segment_sum(rows, places, count)
