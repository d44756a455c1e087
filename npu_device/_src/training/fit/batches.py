"""Takes batches out of the iterator of a ``fit``, and puts them back."""

from __future__ import annotations

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
    if not isinstance(batches, tf.data.Iterator):
        return iter(pulled)
    try:
        return iter(tf.data.Dataset.from_generator(lambda: iter(pulled), output_signature=batches.element_spec))
    except TypeError:  # optional values, which Keras 3 takes from a list as well
        return iter(pulled)
