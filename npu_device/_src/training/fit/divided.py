"""``npu.distribute.divided``: a data set of which each rank reads its own part, and how each batch says how much."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from npu_device._src.training.fit.share import ROWS, rows_of
from npu_device._src.training.world import World, world_unless_child


class Divided:
    """The data set that ``divided`` returns on several ranks: the batches of this rank."""

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
    """Return a data set with the same number of batches on every rank; samples of the added batches don't count.

    Raises:
        ValueError: a rank has no batch at all.
    """
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
