"""What ranks have found, compared with each other and with what one process finds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from pool import Pool

TOLERANCE = 3e-5
"""Largest difference of weights and metrics of order one after some twenty steps, float32."""


def same(first: Any, second: Any, tolerance: float = TOLERANCE, path: str = "") -> None:
    """Compare nested outcomes to float32 rounding."""
    if isinstance(first, dict):
        assert set(first) == set(second), path
        for key in first:
            same(first[key], second[key], tolerance, f"{path}/{key}")
    elif isinstance(first, (list, tuple)):
        assert len(first) == len(second), path
        for place, (one, other) in enumerate(zip(first, second)):
            same(one, other, tolerance, f"{path}/{place}")
    elif isinstance(first, str):
        assert first == second, path
    else:
        np.testing.assert_allclose(first, second, rtol=tolerance, atol=tolerance, err_msg=path)


def same_bits(first: Any, *others: Any) -> None:
    """Compare nested outcomes to the last bit."""
    for other in others:
        same(other, first, 0.0)


_alone: dict[Any, Any] = {}


def compare(
    several: Pool,
    single: Pool,
    body: Any,
    *arguments: Any,
    directory: Path | None = None,
    tolerance: float = TOLERANCE,
) -> list[Any]:
    """Run a body alone (once) and on several ranks, whose weights are the same to the last bit."""
    key = (body, single.keras, repr(arguments))
    given = arguments if directory is None else (*arguments, str(directory))
    if key not in _alone:
        [_alone[key]] = single.run(body, *given)
    ranks = several.run(body, *given)
    for rank in ranks:
        same(rank, _alone[key], tolerance)
    same_bits(*(rank["weights"] for rank in ranks))
    return ranks
