"""Values of several parameters, combined: all with ``--full``, else only so many that each value occurs."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest


def some(values: Sequence[Any], step: int = 2) -> list[Any]:
    """Return all values as parameters. All but every second one, or another step, are marked as ``full``."""
    return [
        pytest.param(value, marks=[] if number % step == 0 else [pytest.mark.full])
        for number, value in enumerate(values)
    ]


def combinations(*values: Sequence[Any], usual: int = 0) -> list[Any]:
    """Return every combination as a parameter. Those beyond the usual number, by default of the longest sequence, are
    marked as ``full``.
    """
    count = usual or max(map(len, values))
    diagonal = {tuple(number % len(choices) for choices in values) for number in range(count)}
    return [
        pytest.param(
            *(choices[place] for choices, place in zip(values, places)),
            marks=[] if places in diagonal else [pytest.mark.full],
        )
        for places in itertools.product(*map(range, map(len, values)))
    ]
