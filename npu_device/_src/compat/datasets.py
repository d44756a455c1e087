"""The private parts of tf.data that the package uses: what a dataset is made of, and its seeds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import tensorflow as tf


def datasets_of(dataset: Any) -> Iterator:
    """Yield a ``tf.data.Dataset`` and the datasets that it is made of."""
    yield dataset
    for source in getattr(dataset, "_inputs", list)():
        yield from datasets_of(source)


def shuffle_seeds(dataset: Any) -> list[tuple[int | None, ...]]:
    """Return the seeds of all that is random in the order of a ``tf.data.Dataset``, as ``shuffle`` is, also in the
    functions of ``flat_map`` and ``interleave``; None for a seed that isn't known yet.

    Both seeds are 0 where neither shuffle nor tf.random.set_seed was given one (TensorFlow 2.15 to 2.21).
    """
    seeds: list[tuple[int | None, ...]] = []
    for source in reversed(list(datasets_of(dataset))):
        if hasattr(source, "_seed2"):
            seeds.append((_static_seed(source._seed), _static_seed(source._seed2)))
        function = getattr(getattr(source, "_map_func", None), "function", None)
        if function is None:
            continue
        for operation in function.graph.get_operations():
            if operation.type.startswith(("ShuffleDataset", "RandomDataset")):
                numbers = [tensor for tensor in operation.inputs if tensor.dtype == tf.int64]
                seeds.append(tuple(map(_static_seed, numbers[-2:])))
    return seeds


def has_fixed_order(dataset: Any) -> bool:
    """Return False if a ``tf.data.Dataset`` may give its elements in any order (``deterministic=False``)."""
    is_free = any(
        getattr(source, "_deterministic", "") == "false" for source in datasets_of(dataset)
    )
    return not is_free and dataset.options().deterministic is not False


def _static_seed(tensor: Any) -> int | None:
    seed = tf.get_static_value(tf.convert_to_tensor(tensor))
    if seed is None:
        return None
    return int(seed)


def dataset_of(iterator: Any) -> Any:
    """Return the dataset of an eager ``tf.data`` iterator; None for another one. It has no public name."""
    return getattr(iterator, "_dataset", None)


def is_generated(dataset: Any) -> bool:
    """Return True if the elements of a ``tf.data.Dataset`` come from a Python generator; also of anything else."""
    if not isinstance(dataset, tf.data.Dataset):
        return True
    # ``from_generator`` is a flat_map, too.
    function = getattr(getattr(dataset, "_map_func", None), "function", None)
    if function is not None:
        operations = function.graph.get_operations()
        if any(operation.type == "GeneratorDataset" for operation in operations):
            return True
    return any(map(is_generated, dataset._inputs()))


def tuples_for_lists(structure: Any) -> Any:
    """Return nested data with tuples in place of lists. The function has no public name."""
    return tf.__internal__.nest.list_to_tuple(structure)
