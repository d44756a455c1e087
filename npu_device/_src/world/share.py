"""Division: the share of this rank in a batch, and its weight.

A batch may hold tensors of different lengths, such as 40 unlabelled and 10 labelled samples. All are cut at the same
fractions: the greatest common divisor of the lengths, here 10, is the number of units, and each rank gets a run of
neighbouring units, here of 4 and 1 samples. With tensors of one length, a unit is a sample.

Knows tensors only, no Keras and no model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Union

import numpy as np
import tensorflow as tf

ROWS = "npu_device_rows"
"""Key of the tag in a batch that is divided already: how many samples count, and a mark; see ``divided``."""

Number = Union[int, tf.Tensor]


@dataclass(frozen=True)
class Share:
    data: Any  # of the model's step; without units samples that don't count, so that the step has something to work on
    units: Number  # that count, on this rank
    total: Number  # on all ranks together

    @property
    def rows(self) -> Number:
        """Return the number of samples in ``data``, of its first tensor; an int, or int32 of shape []."""
        return rows_of(self.data)

    @property
    def weight(self) -> np.float64 | tf.Tensor:
        """Return the part of this rank in all samples, in float64: a tensor of shape [] if not known yet."""
        if isinstance(self.units, int) and isinstance(self.total, int):
            return np.float64(self.units / self.total if self.total else 0.0)
        return tf.math.divide_no_nan(
            tf.cast(self.units, tf.float64), tf.cast(self.total, tf.float64)
        )

    @property
    def counts(self) -> np.float64 | tf.Tensor:
        """Return 1 when this rank has samples, 0 when it works on one that doesn't count; in float64."""
        if isinstance(self.units, int):
            return np.float64(self.units > 0)
        return tf.cast(self.units > 0, tf.float64)

    def counted(self, tensor: tf.Tensor) -> tf.Tensor:
        """Return a tensor computed from the share; without its rows if they don't count."""
        if isinstance(self.units, int):
            return tensor if self.units else tensor[:0]
        return tensor[: tf.where(self.units > 0, tf.shape(tensor)[0], 0)]


def share_of_batch(data: Any, rank: int, size: int, division: str = "alike") -> Share:
    """Cut this rank's run of units out of a batch; ``"first"`` cuts by the length of the first tensor, as 0.1 did."""
    rows = rows_of(data)
    total = rows if division == "first" else units_of(data)
    begin, end = rank * total // size, (rank + 1) * total // size
    if isinstance(total, int):
        first = min(begin, max(total - 1, 0))
        last = max(end, first + 1)
    else:
        first = tf.minimum(begin, tf.maximum(total - 1, 0))
        last = tf.maximum(end, first + 1)
    return Share(run_of(data, total, first, last, division), end - begin, total)


def lengths_of(data: Any) -> list[Number]:
    return [length_of(leaf) for leaf in tf.nest.flatten(data) if _is_divisible(leaf)]


def units_of(data: Any) -> Number:
    return _common_divisor(lengths_of(data))


def run_of(data: Any, total: Number, first: Number, last: Number, division: str = "alike") -> Any:
    """Return a run of a batch's units: from the first to before the last of a total number."""
    several = len(lengths_of(data)) > 1

    def cut(leaf: Any) -> Any:
        if not _is_divisible(leaf):
            return leaf
        length = length_of(leaf)
        parts = max(total, 1) if isinstance(total, int) else tf.maximum(total, 1)
        unit = length // parts if several and division == "alike" else 1
        return _cut(leaf, first * unit, last * unit)

    return tf.nest.map_structure(cut, data)


def units_at(data: Any, total: Number, places: Sequence[int]) -> Any:
    """Return some of a batch's units, of a total number, in the order of their places."""
    runs = [run_of(data, total, place, place + 1) for place in places]
    return tf.nest.map_structure(_joined, *runs)


def _joined(*leaves: Any) -> Any:
    if not _is_divisible(leaves[0]):
        return leaves[0]
    if isinstance(leaves[0], tf.SparseTensor):
        return tf.sparse.concat(0, leaves)
    return tf.concat(leaves, axis=0)


def tag_of(data: Any) -> Any:
    """Return the tag of a batch that is divided already, int64 of shape [2]; see ``divided.with_rows``."""
    return (data[0] if isinstance(data, (tuple, list)) else data)[ROWS]


def is_divided(data: Any) -> bool:
    x = data[0] if isinstance(data, (tuple, list)) and data else data
    return isinstance(x, dict) and ROWS in x


def content(data: Any) -> Any:
    """Return a batch in the form that the step of the model gets."""
    if not is_divided(data):
        return data
    if isinstance(data, dict):
        return data["x"]
    return (data[0]["x"], *data[1:]) if len(data) > 1 else data[0]["x"]


def rows_of(data: Any) -> Number:
    """Return the number of samples in a batch: of its first tensor, as Keras counts them."""
    for leaf in filter(_is_divisible, tf.nest.flatten(data)):
        return length_of(leaf)
    raise ValueError(
        "there is no tensor with a batch dimension in the data that fit, evaluate or predict was given"
    )


def require_units(data: Any, size: int) -> None:
    """Raise ValueError for a batch whose tensors' lengths have no common divisor: not all first axes are samples."""
    lengths = set(map(int, lengths_of(data)))
    if size == 1 or len(lengths) < 2 or math.gcd(*lengths) > 1:
        return
    raise ValueError(
        "a replicated model divides a batch among the ranks along the first axis of each tensor, but the lengths of "
        f"these have no common divisor:\n{shapes_of(data)}\nLikely cause: the first axis of some isn't samples, as in "
        "pairs, or in graphs with lists of nodes and edges.\nWhat to do: put the samples first in each tensor; or let "
        "each rank read its own batches, and pass them as npu.distribute.divided(dataset)."
    )


def shapes_of(data: Any) -> str:
    """Return the tensors of a batch that are divided, by name, with their shapes, one a line."""
    return "\n".join(
        f"  data{name}: shape {tuple(tf.TensorShape(leaf.shape))}"
        for name, leaf in _named("", data)
        if _is_divisible(leaf)
    )


def length_of(leaf: Any) -> Number:
    if isinstance(leaf, tf.RaggedTensor):
        return tf.cast(leaf.nrows(), tf.int32)
    shape = tf.TensorShape(
        leaf.shape
    )  # Keras 3's train_on_batch passes numpy's arrays on, whose shapes are tuples
    known = shape[0] if shape.rank is not None else None
    if known is not None:
        return int(known)
    sizes = leaf.dense_shape if isinstance(leaf, tf.SparseTensor) else tf.shape(leaf)
    return tf.cast(sizes[0], tf.int32)


def without_optional(data: Any) -> Any:
    """Return a batch with None where Keras 3 has an empty Optional for it."""
    return tf.nest.map_structure(
        lambda leaf: None if isinstance(leaf, tf.experimental.Optional) else leaf, data
    )


def _is_divisible(leaf: Any) -> bool:
    return (
        leaf is not None
        and not isinstance(leaf, tf.experimental.Optional)
        and tf.TensorShape(leaf.shape).rank != 0
    )


def _named(name: str, data: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(data, dict):
        for key in data:
            yield from _named(f"{name}[{key!r}]", data[key])
    elif isinstance(data, (tuple, list)):
        for place, part in enumerate(data):
            yield from _named(f"{name}[{place}]", part)
    else:
        yield name, data


def _common_divisor(lengths: Sequence[Number]) -> Number:
    if all(isinstance(length, int) for length in lengths):
        return math.gcd(*lengths)
    if len(lengths) == 1:
        return lengths[0]
    each = tf.stack([tf.cast(length, tf.int32) for length in lengths])
    each = tf.where(
        each == 0, tf.reduce_max(each), each
    )  # an empty tensor fits any number of units

    def differ(each: tf.Tensor) -> tf.Tensor:  # false at once for tensors of one length
        return tf.reduce_min(each) < tf.reduce_max(each)

    def remainders(each: tf.Tensor) -> tuple[tf.Tensor]:
        least = tf.reduce_min(each)
        rest = each % least
        return (tf.where(rest == 0, least, rest),)

    [each] = tf.while_loop(differ, remainders, [each])
    return each[0]


def _cut(leaf: Any, first: Any, last: Any) -> Any:
    if not isinstance(leaf, tf.SparseTensor):
        return leaf[first:last]
    start = tf.concat([tf.cast([first], tf.int64), tf.zeros_like(leaf.dense_shape[1:])], axis=0)
    size = tf.concat([tf.cast([last - first], tf.int64), leaf.dense_shape[1:]], axis=0)
    cut = tf.sparse.slice(leaf, start, size)
    cut.set_shape([last - first if isinstance(first, int) else None, *leaf.shape[1:]])
    return cut
