"""Results on GPUs equal those of one process on the CPU."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from pool import Pool

from gpu import bodies
from gpu.conftest import Way


def test_every_dtype_goes_its_way(way: Way) -> None:
    """One list has floating-point tensors on the GPU and the CPU, integers, and rows; all ranks go in one order."""
    size = 2
    expected = bodies.expected_numbers(size)
    for found in way.pool(size, "3").run(bodies.numbers):
        for mode, results in found.items():
            assert len(results) == len(expected)
            for place, (result, right) in enumerate(zip(results, expected)):
                np.testing.assert_allclose(result, right, rtol=1e-2, err_msg=f"{mode}, result {place}")


@pytest.mark.parametrize("keras", ["2", "3"], ids=["keras2", "keras3"])
def test_custom_loops(way: Way, on_cpu: Callable[[str], Pool], keras: str) -> None:
    [right] = on_cpu(keras).run(bodies.loop, 6, 1, True)
    for segments, compiled in ((1, True), (4, True), (1, False)):
        for found in way.pool(2, keras).run(bodies.loop, 6, segments, compiled):
            np.testing.assert_allclose(found, right, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("keras", ["2", "3"], ids=["keras2", "keras3"])
def test_fit(way: Way, on_cpu: Callable[[str], Pool], keras: str) -> None:
    """Under Keras 3, a GPU turns XLA on, unless the callback or ``replicate`` turns it off."""
    for mixed, replicate in ((False, False), (False, True), (True, False), (True, True)):
        [right] = on_cpu(keras).run(bodies.fit, mixed, replicate)
        tolerance = 2e-2 if mixed else 2e-3
        for found in way.pool(2, keras).run(bodies.fit, mixed, replicate):
            np.testing.assert_allclose(found, right, rtol=tolerance, atol=tolerance, err_msg=f"{mixed} {replicate}")
