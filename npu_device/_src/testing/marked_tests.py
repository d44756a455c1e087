"""What both sides of pytest's plugin know of a test with the mark ``ranks``: how many ranks it has."""

from __future__ import annotations

from typing import Any

import pytest

PARAMETER = "npu_ranks"
RANK = pytest.StashKey[Any]()
"""Key of the object that answers for a rank, in the configuration of its session; the test's process has none."""


def size_of(item: pytest.Item) -> int | None:
    """Return the number of ranks that a test has; None without the mark."""
    parameters: dict[str, Any] = getattr(getattr(item, "callspec", None), "params", {})
    return parameters.get(PARAMETER)
