"""Replicated models whose steps hide something: one process's result, or a message that says what can't be divided."""

from __future__ import annotations

import own_step_bodies
import pytest
from pool import Pool
from test_replicate import compare


@pytest.mark.parametrize(
    "kind", ["added alone", "activity", "not reduced", pytest.param("added", marks=pytest.mark.only_keras("3"))]
)
def test_losses_per_sample(several_keras_ranks: Pool, keras_single: Pool, kind: str) -> None:
    compare(several_keras_ranks, keras_single, own_step_bodies.body_losses, kind)


def test_tensors_of_different_lengths(several_keras_ranks: Pool, keras_single: Pool) -> None:
    compare(several_keras_ranks, keras_single, own_step_bodies.body_two_lengths)


@pytest.mark.parametrize(
    "kind",
    [
        "parts",
        pytest.param("legacy", marks=pytest.mark.only_keras("2")),
        "dictionaries",
        "an object",
        "a closure",
    ],
)
def test_optimizers_anywhere(several_keras_ranks: Pool, keras_single: Pool, kind: str) -> None:
    compare(several_keras_ranks, keras_single, own_step_bodies.body_optimizers, kind)


@pytest.mark.parametrize(
    "kind", ["synchronised", "variable", "static size", "of another model", "a part for testing only"]
)
def test_own_steps(several_keras_ranks: Pool, keras_single: Pool, kind: str) -> None:
    compare(several_keras_ranks, keras_single, own_step_bodies.body_step, kind)


def test_float64(several_keras_ranks: Pool, keras_single: Pool) -> None:
    body = own_step_bodies.body_float64
    compare(several_keras_ranks, keras_single, body, tolerance=1e-13)


@pytest.mark.parametrize("names", ["none", "some"])
def test_a_class_with_a_fit_of_its_own(several_keras_ranks: Pool, names: str) -> None:
    first, *others = several_keras_ranks.run(own_step_bodies.body_own_fit, names)
    assert first == [True, True, True]
    assert others == [[]] * len(others)


def test_building_calls_as_keras_does(several_keras_ranks: Pool, keras_single: Pool) -> None:
    [alone] = keras_single.run(own_step_bodies.body_arguments)
    size = several_keras_ranks.size
    for rank in several_keras_ranks.run(own_step_bodies.body_arguments):
        # A share of a batch has a static size, as the batch has.
        assert set(rank) == {(*call[:2], 6 // size) if call[0] == "call" else call for call in alone}


def test_first_axes_that_are_not_samples(keras_two_ranks: Pool) -> None:
    for error in keras_two_ranks.run(own_step_bodies.body_first_axes, "whole"):
        assert "  data['edges']: shape (12, 2)\n" in error and "  data['nodes']: shape (7, 6)\n" in error
        assert "npu.distribute.divided(dataset)" in error
    assert keras_two_ranks.run(own_step_bodies.body_first_axes, "divided") == ["", ""]


def test_the_division_of_0_1(keras_two_ranks: Pool) -> None:
    assert keras_two_ranks.run(own_step_bodies.body_old_division) == [(2, 2), (2, 2)]


def test_the_statement(keras_two_ranks: Pool, keras: str) -> None:
    for kind in ("new", *(["legacy"] if keras == "2" else [])):
        lines = keras_two_ranks.run(own_step_bodies.body_statement, kind)[0]
        assert "  learning rate  ExponentialDecay (SGD), as given, not scaled by the number of ranks" in lines
        [about] = [line for line in lines if line.startswith("  batch norm ")]
        assert "1 layer (one)" in about and "synchronized=True" in about
