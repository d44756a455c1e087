"""Numbers that scripts give as Python numbers, numpy numbers or tensors."""

from __future__ import annotations

import numbers
from typing import Any

import tensorflow as tf


def scalar(value: Any, dtype: Any) -> tf.Tensor:
    """Return a tensor of the dtype. tf.cast alone would convert Python numbers to float32 first and lose digits."""
    return tf.constant(value, dtype) if isinstance(value, numbers.Number) else tf.cast(value, dtype)
