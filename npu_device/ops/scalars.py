"""Numbers that scripts give as Python numbers, numpy numbers or tensors."""

from __future__ import annotations

import numbers
from typing import Any

import tensorflow as tf


def scalar(value: Any, dtype: Any) -> tf.Tensor:
    """A tensor of the dtype. tf.cast alone would take a Python number through float32 and lose digits in float64."""
    return tf.constant(value, dtype) if isinstance(value, numbers.Number) else tf.cast(value, dtype)
