"""Nothing grows with the number of steps, on the host or on the GPU."""

from __future__ import annotations

import pytest

from gpu import bodies
from gpu.conftest import Way

STEPS = 10_000
MOST_MB = 12


@pytest.mark.slow
def test_memory_is_flat(way: Way) -> None:
    steps = STEPS // 10 if way.apart else STEPS  # ranks that share a GPU wait for each other's time slices in NCCL
    for grown in way.pool(2, "3").run(bodies.memory, steps, timeout=540):
        assert grown["host"] < MOST_MB
        assert grown["gpu"] < 1
