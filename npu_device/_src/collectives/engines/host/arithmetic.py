"""Reduce rows of arrays, one per rank: the arithmetic of the backends that work on arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Callable, Union

import numpy as np

Rows = Union[np.ndarray, Sequence[np.ndarray]]

FOLDS: dict[str, Any] = {"sum": np.add, "mean": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum}


def folding(reduction: str, divisor: int) -> Callable[[Rows, np.ndarray], None]:
    """Return a function that reduces rows, in order, into another array, and divides a mean by a divisor.

    It works in the result's dtype; 16-bit floats are combined in float32 and rounded once at the end.
    """
    combine = FOLDS[reduction]

    def fold(rows: Rows, result: np.ndarray) -> None:
        total = np.empty(result.shape, np.float32) if is_narrow(result.dtype) else result
        with np.errstate(all="ignore"):  # infinite gradients are left to the loss scale; TensorFlow doesn't warn either
            if len(rows) == 1:
                total[:] = rows[0]
            else:
                combine(rows[0], rows[1], out=total, dtype=total.dtype, casting="unsafe")
            for row in rows[2:]:
                combine(total, row, out=total, dtype=total.dtype, casting="unsafe")
            if reduction == "mean" and divisor & (divisor - 1) == 0:
                np.multiply(total, total.dtype.type(1.0 / divisor), out=total)  # the bits of a division, but faster
            elif reduction == "mean":
                np.divide(total, divisor, out=total)
            if total is not result:
                result[:] = total

    return fold


def is_narrow(dtype: np.dtype) -> bool:
    """Return whether a dtype is a 16-bit float; numpy sees bfloat16 as bytes."""
    return dtype.itemsize == 2 and dtype.kind not in "iu"
