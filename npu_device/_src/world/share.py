"""Division: the share of this rank in a batch, and which fraction of the samples that is.

A batch may hold tensors of different lengths, such as 40 unlabelled and 10 labelled samples. All are cut at the same
fractions: the greatest common divisor of the lengths, here 10, is the number of units, and each rank gets a run of
neighbouring units, here of 4 and 1 samples. With tensors of one length, a unit is a sample.

Knows tensors only, no Keras and no model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Union

import numpy as np
import tensorflow as tf

ROWS = "npu_device_rows"
"""Key of the tag in a batch of a rank's own data: how many samples count, and a mark; see ``divided.with_tag``."""

Number = Union[int, tf.Tensor]


@dataclass(frozen=True)
class Share:
    """The part of a batch that one rank gets. A batch has units: samples, if its tensors have one length."""

    # What the model's step gets. Without units, it is a real sample that another rank counts, so that the step has
    # something to work on.
    data: Any
    units: Number  # units that count, on this rank
    total: Number  # units on all ranks together

    @property
    def rows(self) -> Number:
        """Return the number of samples in ``data``, of its first tensor; an int, or int32 of shape []."""
        return rows_of(self.data)

    @property
    def fraction(self) -> np.float64 | tf.Tensor:
        """Return the fraction of all samples that this rank has, in float64: a tensor of shape [] if not known yet."""
        # Python's numbers need no operations in a graph, and most batches have them.
        if isinstance(self.units, int) and isinstance(self.total, int):
            return np.float64(self.units / max(self.total, 1))
        units = tf.cast(self.units, tf.float64)
        total = tf.cast(self.total, tf.float64)
        return tf.math.divide_no_nan(units, total)

    @property
    def sum_factor(self) -> np.float64 | tf.Tensor:
        """Return this rank's factor in a sum, in float64: 1, or 0 when it works on a sample that doesn't count."""
        if isinstance(self.units, int):
            return np.float64(self.units > 0)
        return tf.cast(self.units > 0, tf.float64)

    def counted(self, tensor: tf.Tensor) -> tf.Tensor:
        """Return a tensor computed from the share; without its rows if they don't count."""
        if not isinstance(self.units, int):
            length = tf.shape(tensor)[0]
            return tensor[: tf.where(self.units > 0, length, 0)]
        if self.units:
            return tensor
        return tensor[:0]


def share_of_batch(batch: Any, rank: int, size: int, division: str = "alike") -> Share:
    """Cut this rank's run of units out of a batch; ``"first"`` cuts by the length of the first tensor, as 0.1 did."""
    rows = rows_of(batch)
    total = rows
    if division != "first":
        total = units_of(batch)
    start, end = bounds_of_rank(total, rank, size)
    # A rank without units works on one that doesn't count: the others wait for it in the collectives of the step.
    samples = run_of(batch, total, start, _at_least(start + 1, end), division)
    return Share(samples, end - start, total)


def bounds_of_rank(total: Number, rank: int, size: int) -> tuple[Number, Number]:
    """Return which of a total number of units are those of a rank: the first one, and the one after the last."""
    # Whole numbers, so that shares differ by one unit at most and leave none out.
    return rank * total // size, (rank + 1) * total // size


def _at_least(least: Number, number: Number) -> Number:
    if isinstance(number, int):
        return max(least, number)
    return tf.maximum(least, number)


def lengths_of(batch: Any) -> list[Number]:
    return list(map(length_of, filter(_is_divisible, tf.nest.flatten(batch))))


def run_of(batch: Any, total: Number, start: Number, end: Number, division: str = "alike") -> Any:
    """Return a run of a batch's units: from the first to before the last of a total number."""
    has_units = len(lengths_of(batch)) > 1 and division == "alike"

    def cut(leaf: Any) -> Any:
        if not _is_divisible(leaf):
            return leaf
        unit_length: Number = 1
        if has_units:
            # An empty batch has no unit, and mustn't divide by 0.
            unit_length = length_of(leaf) // _at_least(1, total)
        return _cut(leaf, start * unit_length, end * unit_length)

    return tf.nest.map_structure(cut, batch)


def units_at(batch: Any, total: Number, positions: Sequence[int]) -> Any:
    """Return some of a batch's units, of a total number, in the order of their positions."""
    # Cut one by one, as tensors of several kinds can't be indexed by a list.
    runs = [run_of(batch, total, position, position + 1) for position in positions]
    return tf.nest.map_structure(_joined, *runs)


def _joined(*leaves: Any) -> Any:
    if not _is_divisible(leaves[0]):
        return leaves[0]
    if isinstance(leaves[0], tf.SparseTensor):
        return tf.sparse.concat(0, leaves)
    return tf.concat(leaves, axis=0)


def count_of(batch: Any) -> Any:
    """Return how many samples count in a tagged batch, int64 of shape []."""
    return batch[0][ROWS][0]


def mark_of(batch: Any) -> Any:
    """Return the mark of a tagged batch, int64 of shape []; 0 without one."""
    return batch[0][ROWS][1]


def is_tagged(batch: Any) -> bool:
    """Return whether a batch is from a rank's own data, not to be cut into shares."""
    if not isinstance(batch, (tuple, list)) or not batch:
        return False
    return isinstance(batch[0], dict) and ROWS in batch[0]


def content(batch: Any) -> Any:
    """Return a batch in the form that the step of the model gets."""
    if not is_tagged(batch):
        return batch
    tagged, *targets = batch
    if not targets:
        return tagged["x"]
    return (tagged["x"], *targets)


def rows_of(batch: Any) -> Number:
    """Return the number of samples in a batch: of its first tensor, as Keras counts them."""
    for leaf in filter(_is_divisible, tf.nest.flatten(batch)):
        return length_of(leaf)
    raise ValueError(
        "there is no tensor with a batch dimension in the data that fit, evaluate or predict was given"
    )


def require_units(batch: Any, size: int) -> None:
    """Raise ValueError for a batch whose tensors' lengths have no common divisor: not all first axes are samples.

    Asked of a first batch only. A later one, such as a smaller last one, is a single unit, which the last rank counts.
    """
    lengths = set(map(int, lengths_of(batch)))
    if size == 1 or len(lengths) < 2 or math.gcd(*lengths) > 1:
        return
    raise ValueError(
        "a replicated model divides a batch among the ranks along the first axis of each tensor, but the lengths of "
        f"these have no common divisor:\n{shapes_of(batch)}\nLikely cause: the first axis of some isn't samples, as in "
        "pairs, or in graphs with lists of nodes and edges.\nWhat to do: put the samples first in each tensor; or let "
        "each rank read its own batches, and pass them as npu.distribute.divided(dataset)."
    )


def shapes_of(batch: Any) -> str:
    """Return the tensors of a batch that are cut, by name, with their shapes, one a line."""
    return "\n".join(
        f"  data{name}: shape {tuple(tf.TensorShape(leaf.shape))}"
        for name, leaf in named_leaves("", batch)
        if _is_divisible(leaf)
    )


def length_of(leaf: Any) -> Number:
    if isinstance(leaf, tf.RaggedTensor):
        return tf.cast(leaf.nrows(), tf.int32)
    # Keras 3's train_on_batch passes numpy's arrays on, whose shapes are tuples.
    shape = tf.TensorShape(leaf.shape)
    if shape.rank is not None and shape[0] is not None:
        return int(shape[0])
    if isinstance(leaf, tf.SparseTensor):
        sizes = leaf.dense_shape
    else:
        sizes = tf.shape(leaf)
    return tf.cast(sizes[0], tf.int32)


def spec_of_any_length(leaf: Any) -> Any:
    """Return the type of a part of a batch, for any number of samples."""
    if leaf is None:
        return None
    spec = tf.type_spec_from_value(leaf)
    if isinstance(leaf, tf.experimental.Optional) or not spec.shape.rank:
        return spec
    shape = [None, *spec.shape[1:]]
    if isinstance(spec, tf.SparseTensorSpec):
        return tf.SparseTensorSpec(shape, spec.dtype)
    if isinstance(spec, tf.RaggedTensorSpec):
        return tf.RaggedTensorSpec(shape, spec.dtype, spec.ragged_rank, spec.row_splits_dtype)
    return tf.TensorSpec(shape, spec.dtype)


def without_optional(batch: Any) -> Any:
    """Return a batch with None where Keras 3 has an empty Optional for it."""

    def none_or_leaf(leaf: Any) -> Any:
        if isinstance(leaf, tf.experimental.Optional):
            return None
        return leaf

    return tf.nest.map_structure(none_or_leaf, batch)


def _is_divisible(leaf: Any) -> bool:
    if leaf is None or isinstance(leaf, tf.experimental.Optional):
        return False
    return tf.TensorShape(leaf.shape).rank != 0


def named_leaves(name: str, batch: Any) -> Iterator[tuple[str, Any]]:
    """Yield the tensors in nested data, each after its name, such as ``data['x'][0]``."""
    if isinstance(batch, Mapping):
        for key in batch:
            yield from named_leaves(f"{name}[{key!r}]", batch[key])
    elif isinstance(batch, (tuple, list)):
        for position, branch in enumerate(batch):
            yield from named_leaves(f"{name}[{position}]", branch)
    else:
        yield name, batch


def units_of(batch: Any) -> Number:
    """Return the greatest common divisor of the lengths of a batch's tensors."""
    lengths = lengths_of(batch)
    if all(isinstance(length, int) for length in lengths):
        return math.gcd(*lengths)
    if len(lengths) == 1:
        return lengths[0]
    sizes = tf.stack([tf.cast(length, tf.int32) for length in lengths])
    # An empty tensor fits any number of units.
    sizes = tf.where(sizes == 0, tf.reduce_max(sizes), sizes)

    def differ(sizes: tf.Tensor) -> tf.Tensor:
        return tf.reduce_min(sizes) < tf.reduce_max(sizes)

    def remainders(sizes: tf.Tensor) -> tuple[tf.Tensor]:
        # Euclid's algorithm, for all lengths at once.
        least = tf.reduce_min(sizes)
        remainder = sizes % least
        return (tf.where(remainder == 0, least, remainder),)

    # Ends at once if all lengths are equal, as they are in most batches.
    [sizes] = tf.while_loop(differ, remainders, [sizes])
    return sizes[0]


def _cut(leaf: Any, start: Any, end: Any) -> Any:
    if not isinstance(leaf, tf.SparseTensor):
        return leaf[start:end]
    row_shape = leaf.dense_shape[1:]
    row = tf.cast([start], tf.int64)
    count = tf.cast([end - start], tf.int64)
    corner = tf.concat([row, tf.zeros_like(row_shape)], axis=0)
    size = tf.concat([count, row_shape], axis=0)
    cut = tf.sparse.slice(leaf, corner, size)
    length = None
    if isinstance(start, int) and isinstance(end, int):
        length = end - start
    # ``tf.sparse.slice`` forgets the shape.
    cut.set_shape([length, *leaf.shape[1:]])
    return cut
