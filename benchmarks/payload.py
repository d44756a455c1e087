"""The input of an all_reduce, and the check of its result: a benchmark of wrong results would be worthless."""

from __future__ import annotations

import numpy as np


def payload(size: int, rank: int) -> np.ndarray:
    """Return a float32 vector of ``size`` bytes, filled with the rank plus 1."""
    return np.full(size // 4, rank + 1, np.float32)


def require_sum(result: np.ndarray, ranks: int) -> None:
    """Check the sum of all ranks' payloads.

    Raises:
        ArithmeticError: the sum is wrong.
    """
    expected = ranks * (ranks + 1) / 2
    low, high = float(result.min()), float(result.max())
    if low != expected or high != expected:
        raise ArithmeticError(f"the sum should be {expected} everywhere; found {low} to {high}")
