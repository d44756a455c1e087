"""Data of which each rank has its own part, and how each batch says how much: ``npu.distribute.divided``, a dataset;
a ``keras.utils.PyDataset`` or ``Sequence`` with a method ``rows``, by which each rank makes its own rows of a batch.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from npu_device._src import compat
from npu_device._src.training.fit import start
from npu_device._src.training.fit.share import ROWS, rows_of
from npu_device._src.training.world import World, world_unless_child

_SETTINGS = ("workers", "use_multiprocessing", "max_queue_size")  # of a PyDataset in Keras 3


class Divided:
    """The dataset that ``divided`` returns on several ranks: the batches of this rank."""

    def __init__(self, dataset: tf.data.Dataset) -> None:
        self.dataset = dataset


def divided(dataset: Any) -> Any:
    """Mark a dataset of which each rank reads its own part, for ``fit`` or ``evaluate`` of a replicated model.

    Args:
        dataset: a ``tf.data.Dataset`` of batches, those of this rank. The batches of all ranks together are the batch
            of a step, weighted by their samples. If the data of a rank end early, it takes part without samples until
            all ranks are done.

    Returns:
        An argument for ``fit``, ``evaluate`` or ``validation_data`` of a model that ``replicate`` has returned; on a
        single device the dataset itself.

    Raises:
        TypeError: not a ``tf.data.Dataset``.

    If a dataset doesn't know its length, it is read once to count its batches.

    >>> import tensorflow as tf, npu_device as npu
    >>> dataset = tf.data.Dataset.range(3).batch(2)
    >>> npu.distribute.divided(dataset) is dataset  # a single device
    True
    """
    if not isinstance(dataset, tf.data.Dataset):
        raise TypeError(
            f"expected a tf.data.Dataset of batches for this rank; found a {type(dataset).__name__}.\n"
            "What to do: make one, for instance tf.data.Dataset.from_tensor_slices((x, y)).batch(size)."
        )
    return dataset if world_unless_child() is None else Divided(dataset)


def with_equal_length(world: World, data: Divided) -> tf.data.Dataset:
    """Return a dataset with the same number of batches on every rank; samples of the added batches don't count."""
    dataset = data.dataset
    length = int(dataset.cardinality())
    if length == tf.data.UNKNOWN_CARDINALITY:
        length = int(dataset.reduce(tf.constant(0, tf.int64), lambda count, *_: count + 1))
    lengths = world.objects(length, "length of divided data")
    counted = dataset.map(_counting(None))
    if any(length == tf.data.INFINITE_CARDINALITY for length in lengths):
        return counted
    if 0 in lengths:
        raise ValueError(
            "a rank has no data at all: batches by rank "
            + ", ".join(f"{rank}: {count}" for rank, count in enumerate(lengths))
            + ".\nWhat to do: divide the data so that each rank has at least one sample, or start fewer ranks."
        )
    filling = dataset.take(1).map(_counting(0)).repeat(max(lengths) - length)
    return counted.concatenate(filling).apply(tf.data.experimental.assert_cardinality(max(lengths)))


def _counting(rows: int | None) -> Any:
    def count(*elements: Any) -> Any:
        found = tf.cast(rows_of(elements) if rows is None else rows, tf.int64)
        return with_rows(tf.stack([found, 0]), elements)

    return count


def with_rows(tag: Any, batch: Any) -> Any:
    """Return a batch, x or a tuple of x, y and weights, in the form that ``share.is_divided`` recognises.

    Its tag, int64 of shape [2], has the number of samples that count, and a mark that is the same on all ranks if they
    take their samples from the same batch; 0 if they needn't.
    """
    first, *others = batch if isinstance(batch, (tuple, list)) else (batch,)
    x = {ROWS: tag, "x": first}
    return (x, *others) if others else x


def has_rows(model: Any, data: Any) -> bool:
    """Return True for a PyDataset or Sequence, of the Keras of a model, with a method ``rows(index, start, stop)``."""
    return isinstance(data, compat.keras_of(model).utils.Sequence) and callable(getattr(data, "rows", None))


def rows_of_rank(world: World, model: Any, data: Any) -> Any:
    """Return a PyDataset or Sequence of the rows of this rank in each batch.

    ``data.rows`` returns what ``data[index]`` would return, but only the samples from ``start`` to before ``stop``, as
    a slice does: fewer, or none, at the end of the batch. No batch is larger than the first one.
    """
    whole = data[0]
    batch = int(rows_of(whole))
    first, last = (place * batch // world.size for place in (world.rank, world.rank + 1))
    _require_same_rows(world, whole, data.rows(0, first, last), first, last)

    class Rows(compat.keras_of(model).utils.Sequence):  # type: ignore[misc]
        """The rows of this rank; a batch without any has one that doesn't count."""

        def __len__(self) -> int:
            return len(data)

        def __getitem__(self, index: int) -> Any:
            mine = data.rows(index, first, last) if last > first else None
            count = 0 if mine is None else int(rows_of(mine))
            mark = index if index else start.digest(data.rows(0, 0, 1))  # of what on_epoch_end may have shuffled
            return with_rows(np.array([count, mark]), mine if count else data.rows(index, 0, 1))

        def on_epoch_begin(self) -> None:
            getattr(data, "on_epoch_begin", int)()

        def on_epoch_end(self) -> None:
            data.on_epoch_end()

    return Rows(**{name: getattr(data, name) for name in _SETTINGS if hasattr(data, name)})


def _require_same_rows(world: World, whole: Any, mine: Any, first: int, last: int) -> None:
    expected = start.digest(tf.nest.map_structure(lambda leaf: leaf[first:last], whole))
    found = world.objects(expected == start.digest(mine), "rows of the first batch")
    if not all(found):
        wrong = ", ".join(str(rank) for rank, right in enumerate(found) if not right)
        raise ValueError(
            f"rank {world.rank}: rows(0, {first}, {last}) isn't data[0][{first}:{last}] (on ranks {wrong}).\n"
            "Likely cause: rows draws random numbers, or counts its samples from the beginning of the data.\nWhat to "
            "do: let rows(index, start, stop) return what data[index] returns, but only the samples from start to "
            "before stop of that batch; draw random numbers by a seed made of the index of the sample."
        )
