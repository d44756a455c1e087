"""Takes batches out of the iterator of a ``fit``, and puts them back."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import tensorflow as tf


def pull(batches: Any, count: int) -> list[Any]:
    """Return the next batches, fewer than ``count`` if the data end."""
    pulled = []
    for _ in range(count):
        try:
            pulled.append(next(batches))
        except (StopIteration, tf.errors.OutOfRangeError):
            break
    return pulled


def again(batches: Any, pulled: list[Any]) -> Iterator[Any]:
    """Return an iterator of the same kind that begins with what was pulled, so that a function isn't traced again."""
    if not isinstance(batches, tf.data.Iterator) or not pulled:
        return iter(pulled)
    # Not a generator: its Python calls can wait for ever on a rank with one thread, and each one stays in memory.
    parts = map(tf.data.Dataset.from_tensors, pulled)
    variant = tf.data.experimental.to_variant(functools.reduce(tf.data.Dataset.concatenate, parts))
    return iter(tf.data.experimental.from_variant(variant, batches.element_spec))  # which may have unknown dimensions
