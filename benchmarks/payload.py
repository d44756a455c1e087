"""What an all_reduce is given, and what it has to return: a benchmark of wrong results would be worthless."""

from __future__ import annotations

import tensorflow as tf


def payload(size: int, rank: int) -> tf.Tensor:
    """A float32 vector of ``size`` bytes that is full of the rank's number plus 1."""
    return tf.fill([size // 4], tf.constant(rank + 1, tf.float32))


def require_sum(result: tf.Tensor, ranks: int) -> None:
    """Check the sum of everybody's payload.

    Raises:
        ArithmeticError: it is something else.
    """
    expected = ranks * (ranks + 1) / 2
    low, high = float(tf.reduce_min(result)), float(tf.reduce_max(result))
    if low != expected or high != expected:
        raise ArithmeticError(f"the sum should be {expected} everywhere; found {low} to {high}")
