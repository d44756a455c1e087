"""Checks what the suite needs of pytest-xdist."""

from __future__ import annotations

import pytest


@pytest.mark.xdist_group("grouped")
def test_a_group_is_known(request: pytest.FixtureRequest) -> None:
    """pytest-xdist reads the group from the name. Without it, every process would start every pool."""
    is_grouped = request.config.getoption("loadgroup", False)
    told = "pytest-xdist doesn't group under this pytest: pip install 'pytest<9.2'"
    assert request.node.nodeid.endswith("@grouped") == is_grouped, told
