"""The simulation of a model on N ranks: figures that can be worked out by hand, and the table."""

from __future__ import annotations

import pytest

from npu_device._src.tuning.networks import PRESETS, Network, ring
from npu_device._src.tuning.planner import Backward, predict
from npu_device._src.tuning.simulate import Expected, TracedStep, simulate, table

GRADIENTS = 50
STEP = TracedStep(
    Backward((2_000_000,) * GRADIENTS, tuple(0.1 + 0.004 * number for number in range(1, GRADIENTS + 1)), 0.3), 0.02
)


def row(rows: list[Expected], ranks: int, shape: str = "ring") -> Expected:
    return next(found for found in rows if (found.ranks, found.shape) == (ranks, shape))


def test_one_rank_is_perfect() -> None:
    alone = row(simulate(STEP, PRESETS["10gbe"]), 1)
    assert (alone.tuned, alone.default, alone.efficiency) == (STEP.alone, STEP.alone, 1.0)
    assert STEP.alone == pytest.approx(0.32)


def test_a_network_without_cost_is_perfect() -> None:
    assert all(found.efficiency == pytest.approx(1.0) for found in simulate(STEP, Network("free", 0.0, 0.0)))


def test_a_step_that_is_all_communication() -> None:
    """Nothing to hide behind: 100 MB over two ranks at 1 GB/s are 0.1 s, and a message each way."""
    step = TracedStep(Backward((100_000_000,), (0.0,), 0.0), 0.0)
    found = row(simulate(step, Network("slow", 1e-3, 1e-9), [2]), 2)
    assert found.tuned == found.default == pytest.approx(0.1 + 2e-3)


def test_the_tuned_split_is_never_slower_and_is_what_it_says() -> None:
    for found in simulate(STEP, PRESETS["10gbe"]):
        assert found.alone <= found.tuned <= found.default
        if found.shape == "ring" and found.ranks > 1:
            exposed = predict(STEP.backward, ring(PRESETS["10gbe"], found.ranks), found.ends).exposed
            assert found.tuned == pytest.approx(STEP.alone + exposed)


def test_a_ring_of_many_suffers_from_its_latency_and_a_tree_does_not() -> None:
    rows = simulate(STEP, PRESETS["10gbe"])
    assert row(rows, 1024).efficiency < row(rows, 16).efficiency < row(rows, 2).efficiency
    assert row(rows, 1024, "tree").efficiency > row(rows, 1024).efficiency


def test_a_faster_network_is_faster() -> None:
    names = ("10gbe", "25gbe", "100gb")
    efficiencies = [row(simulate(STEP, PRESETS[name]), 64).efficiency for name in names]
    assert efficiencies == sorted(efficiencies)
    assert efficiencies[0] < efficiencies[-1]


def test_no_ranks() -> None:
    with pytest.raises(ValueError, match="expected numbers from 1"):
        simulate(STEP, PRESETS["10gbe"], [0, 2])


def test_the_table_has_a_line_a_row() -> None:
    rows = simulate(STEP, PRESETS["25gbe"])
    lines = table(rows).splitlines()
    assert len(lines) == 2 + len(rows) == 24
    assert lines[-1].split()[:2] == ["1024", "tree"]
    assert f"{rows[-1].efficiency:.1%}" in lines[-1]
