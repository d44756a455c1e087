"""Which rank owns which variable: whole variables, the largest ones first, each to the rank with the least so far."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf


def owners_of(variables: Sequence, size: int) -> list[int]:
    """Return the owner of each variable, a rank of the group; only shapes and dtypes count, so that all ranks agree."""
    sizes = list(map(bytes_of, variables))
    held = [0] * size
    owners = [0] * len(sizes)
    # The sort is stable, so that variables of one size keep their order.
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        owners[index] = held.index(min(held))
        held[owners[index]] += sizes[index]
    return owners


def bytes_of(variable: Any) -> int:
    """Return the size of a variable."""
    shape = tf.TensorShape(variable.shape)
    # A table of strings, for instance, may grow.
    if not shape.is_fully_defined():
        shape = tf.convert_to_tensor(variable).shape
    return int(shape.num_elements() * tf.as_dtype(variable.dtype).size)
