"""A line through measured times finds the figures that the times were made of, and says how well."""

from __future__ import annotations

import random

import pytest

from npu_device._src.tuning.cost_model import CostModel, fit
from npu_device._src.tuning.networks import PRESETS, link_of, ring, tree

ALPHA, BETA = 9.08e-4, 7.40e-10
SIZES = (4_096, 65_536, 1_048_576, 16_777_216, 102_228_128)


def test_exact_times_give_exact_figures() -> None:
    found = fit({size: [ALPHA + BETA * size] * 3 for size in SIZES})
    assert found.alpha == pytest.approx(ALPHA)
    assert found.beta == pytest.approx(BETA)


def test_the_truth_lies_within_two_standard_errors_nineteen_times_of_twenty() -> None:
    chance = random.Random(5)
    hits = 0
    for _ in range(200):
        found = fit({size: [(ALPHA + BETA * size) * chance.gauss(1, 0.08) for _ in range(9)] for size in SIZES})
        hits += abs(found.alpha - ALPHA) <= 2 * found.alpha_error and abs(found.beta - BETA) <= 2 * found.beta_error
    assert hits >= 0.85 * 200


def test_the_uncertainty_is_not_a_wide_guess() -> None:
    chance = random.Random(6)
    found = fit({size: [(ALPHA + BETA * size) * chance.gauss(1, 0.05) for _ in range(9)] for size in SIZES})
    assert 0 < found.alpha_error < 0.05 * ALPHA
    assert 0 < found.beta_error < 0.05 * BETA


def test_times_off_the_line_widen_the_uncertainty() -> None:
    straight = fit({size: [ALPHA + BETA * size] * 3 for size in SIZES})
    bent = fit({size: [ALPHA + BETA * size * (1 + size / max(SIZES))] * 3 for size in SIZES})
    assert bent.beta_error > 3 * straight.beta_error


def test_a_line_that_is_bent_fits_the_large_sizes() -> None:
    """Measured on a link of 1 Gbit/s whose token bucket lets small ones through at once."""
    seconds = {4_096: 1e-3, 1_597_312: 0.0106, 6_389_256: 0.0602, 25_557_032: 0.2244, 51_114_064: 0.4687}
    seconds[102_228_128] = 0.9240
    found = fit({size: [time] * 3 for size, time in seconds.items()})
    for size, time in seconds.items():
        if size > 5_000_000:
            assert found.alpha + found.beta * size == pytest.approx(time, rel=0.05)
    assert found.alpha == pytest.approx(1e-3, rel=0.05)


def test_an_outlier_hardly_counts() -> None:
    times = {size: [ALPHA + BETA * size] * 8 + [1.0] for size in SIZES}
    assert fit(times).alpha == pytest.approx(ALPHA, rel=0.05)


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_lanes_show_how_much_of_alpha_is_shared(share: float) -> None:
    lanes = {4: [ALPHA + 3 * share * ALPHA + 4 * BETA * SIZES[0]] * 3}
    found = fit({size: [ALPHA + BETA * size] * 3 for size in SIZES}, lanes)
    assert found.busy == pytest.approx(share * ALPHA, abs=1e-9)
    assert found.latency == pytest.approx((1 - share) * ALPHA, abs=1e-9)


def test_slower_is_still_a_cost_model_however_numbers_are_rounded() -> None:
    chance = random.Random(7)
    for _ in range(1000):
        alpha, error = chance.uniform(1e-4, 2e-3), chance.uniform(0, 1e-4)
        slower = CostModel(alpha, BETA, busy=alpha, alpha_error=error, beta_error=BETA).slower()
        assert slower.busy == slower.alpha == pytest.approx(alpha + error)
        assert slower.beta == pytest.approx(2 * BETA)


def test_a_negative_alpha_becomes_none() -> None:
    assert fit({1000: [1e-6], 2000: [1e-3]}).alpha == 0.0


def test_slower_is_one_standard_error_up() -> None:
    cost = CostModel(1e-3, 1e-9, busy=5e-4, alpha_error=1e-4, beta_error=1e-10, pack=1e-10)
    slower = cost.slower()
    assert (slower.alpha, slower.beta, slower.busy, slower.pack) == pytest.approx((1.1e-3, 1.1e-9, 5.5e-4, 1e-10))


def test_it_survives_json() -> None:
    cost = CostModel(1e-3, 1e-9, busy=5e-4, alpha_error=1e-4, beta_error=1e-10, pack=2e-10)
    assert CostModel.from_dict(cost.as_dict()) == cost


def test_one_size_is_not_enough() -> None:
    with pytest.raises(ValueError, match="at least two sizes"):
        fit({1000: [1.0]})


@pytest.mark.parametrize(
    "figures",
    [{"alpha": -1.0}, {"beta": -1.0}, {"busy": 2.0}, {"pack": -1.0}, {"load": 1.1}, {"pace": 0.0}, {"pace": 2}],
)
def test_impossible_figures(figures: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="expected seconds from 0"):
        CostModel(**{"alpha": 1.0, "beta": 0.0, **figures})


def test_the_preset_of_10_gbe_has_the_published_latency_of_16_ranks() -> None:
    assert ring(PRESETS["10gbe"], 16).alpha == pytest.approx(ALPHA, rel=0.01)


@pytest.mark.parametrize("ranks", [2, 4, 16, 1024])
def test_a_link_measured_on_a_ring_makes_the_same_ring(ranks: int) -> None:
    cost = CostModel(ALPHA, BETA, pack=5e-10, load=0.4, pace=0.8)
    again = ring(link_of(cost, ranks), ranks)
    assert (again.alpha, again.beta) == (pytest.approx(ALPHA), pytest.approx(BETA))
    assert (again.pack, again.load, again.pace) == (5e-10, 0.4, 0.8)


def test_rings_and_trees() -> None:
    network = PRESETS["100gb"]
    assert ring(network, 2) == tree(network, 2)
    # Many ranks: the ring's latency grows with their number, the tree's with its logarithm; the bytes stay.
    assert ring(network, 1024).alpha == pytest.approx(2046 * network.alpha)
    assert tree(network, 1024).alpha == pytest.approx(20 * network.alpha)
    assert ring(network, 1024).beta == pytest.approx(2 * network.beta, rel=1e-3)
    assert tree(network, 1000).alpha == tree(network, 1024).alpha
