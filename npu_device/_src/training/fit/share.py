"""This rank's share of a batch: its samples, their number, and their weight.

Knows tensors only, no Keras and no model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable, Union

import tensorflow as tf

ROWS = "npu_device_rows"
"""Key under which a data set that is divided already says how many samples of a batch count; see ``divided``."""

Number = Union[int, tf.Tensor]


@dataclass(frozen=True)
class Share:
    """One step's samples on this rank.

    Attributes:
        data: the argument of the model's step. A rank without samples gets one that doesn't count, so that the step has
            something to work on.
        rows: samples that count, on this rank; an int, or int32 of shape [].
        total: samples on all ranks together; an int, or int32 of shape [].
    """

    data: Any
    rows: Number
    total: Number

    @property
    def weight(self) -> float | tf.Tensor:
        """Return this rank's part of all samples: from 0 to 1, a tensor of shape [] if not known yet."""
        if isinstance(self.rows, int) and isinstance(self.total, int):
            return self.rows / self.total
        return tf.math.divide_no_nan(tf.cast(self.rows, tf.float32), tf.cast(self.total, tf.float32))

    @property
    def counts(self) -> float | tf.Tensor:
        """Return 1 when this rank has samples, 0 when it works on one that doesn't count."""
        if isinstance(self.rows, int):
            return float(self.rows > 0)
        return tf.cast(self.rows > 0, tf.float32)


def share_of_batch(data: Any, rank: int, size: int) -> Share:
    """Cut this rank's share out of a batch that all ranks have.

    Args:
        data: nested tensors, dense, sparse or ragged, with the samples along their first dimension, and ``None``.
        rank: this rank.
        size: number of ranks.

    Returns:
        The rank's run of neighbouring samples; runs differ by one sample at most.
    """
    total = rows_of(data)
    begin, end = rank * total // size, (rank + 1) * total // size
    rows = end - begin
    if isinstance(total, int):
        first = min(begin, max(total - 1, 0))
        last = max(end, first + 1)
    else:
        first = tf.minimum(begin, tf.maximum(total - 1, 0))
        last = tf.maximum(end, first + 1)
    return Share(tf.nest.map_structure(lambda leaf: _cut(leaf, first, last), data), rows, total)


def share_of_divided(data: Any, add_up: Callable[[tf.Tensor], tf.Tensor]) -> Share:
    """Return the share given by a batch of a data set that is already divided, see ``divided``.

    Args:
        data: as the data set gives it, with the number of samples that count inside.
        add_up: adds up a tensor over the ranks.
    """
    rest: tuple[Any, ...] = ()
    x = data
    if isinstance(data, (tuple, list)):
        x, rest = data[0], tuple(data[1:])
    rows = tf.cast(x[ROWS], tf.int32)
    inner = (x["x"], *rest) if rest else x["x"]
    return Share(inner, rows, add_up(rows))


def is_divided(data: Any) -> bool:
    """Return True for a batch of a data set that is already divided."""
    x = data[0] if isinstance(data, (tuple, list)) and data else data
    return isinstance(x, dict) and ROWS in x


def rows_of(data: Any) -> Number:
    """Return the number of samples in a batch: of its first tensor, as Keras counts them."""
    for leaf in tf.nest.flatten(data):
        # Keras 3's train_on_batch passes numpy's arrays on, whose shapes are tuples.
        shape = None if leaf is None else tf.TensorShape(leaf.shape)
        if shape is not None and shape.rank != 0:
            if isinstance(leaf, tf.RaggedTensor):
                return tf.cast(leaf.nrows(), tf.int32)
            known = shape[0] if shape.rank is not None else None
            if known is not None:
                return int(known)
            sizes = leaf.dense_shape if isinstance(leaf, tf.SparseTensor) else tf.shape(leaf)
            return tf.cast(sizes[0], tf.int32)
    raise ValueError("there is no tensor with a batch dimension in the data that fit, evaluate or predict was given")


def _cut(leaf: Any, first: Any, last: Any) -> Any:
    if leaf is None or tf.TensorShape(leaf.shape).rank == 0:
        return leaf
    if isinstance(leaf, tf.SparseTensor):
        start = tf.concat([tf.cast([first], tf.int64), tf.zeros_like(leaf.dense_shape[1:])], axis=0)
        size = tf.concat([tf.cast([last - first], tf.int64), leaf.dense_shape[1:]], axis=0)
        cut = tf.sparse.slice(leaf, start, size)
        known = last - first if isinstance(first, int) else None
        cut.set_shape([known, *leaf.shape[1:]])
        return cut
    return leaf[first:last]
