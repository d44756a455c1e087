"""Random numbers in a replicated training step: as many different ones as on one process, and what is drawn once for a
whole batch is the same on all ranks.
"""

from __future__ import annotations

import numpy as np
import pytest
import random_bodies as bodies
from pool import Pool
from test_replicate import same

ONE_PROCESS = bodies.BATCH**-0.5
"""The standard deviation of the mean of a batch's numbers."""


@pytest.mark.parametrize(
    "kind",
    [
        "dropout",
        pytest.param("keras.random", marks=pytest.mark.only_keras("3")),
        "tf.random",
        "noise",
        "seeded noise",
        "flip",
        "generator",
        "function",
        "loop",
    ],
)
def test_noise_is_that_of_one_process(several_keras_ranks: Pool, kind: str) -> None:
    ranks = several_keras_ranks.run(bodies.body_noise, kind)
    for deviation, states in ranks:
        assert deviation == pytest.approx(ONE_PROCESS, rel=0.12), kind  # 1.41 or 1.73 times as large without
        assert states == ranks[0][1]


@pytest.mark.parametrize("kind", ["branch", "number", "drop path", "columns", "weights"])
def test_one_draw_for_the_batch_is_that_of_one_process(
    several_keras_ranks: Pool, keras_single: Pool, kind: str
) -> None:
    [alone] = keras_single.run(bodies.body_shared, kind)
    for rank in several_keras_ranks.run(bodies.body_shared, kind):
        same(rank, alone)
    assert np.ptp(alone) > 0.5  # it is drawn at all


def test_generators_move_on_as_on_one_process(several_keras_ranks: Pool, keras_single: Pool) -> None:
    [(_, alone)] = keras_single.run(bodies.body_noise, "flip")
    for _, states in several_keras_ranks.run(bodies.body_noise, "flip"):
        assert states == alone


def test_outside_of_steps_all_ranks_draw_the_same(several_keras_ranks: Pool) -> None:
    ranks = several_keras_ranks.run(bodies.body_outside)
    assert all(rank == ranks[0] for rank in ranks)


@pytest.mark.parametrize("kind", ["dropout", "generator"])
def test_eager_steps(several_keras_ranks: Pool, kind: str) -> None:
    own = kind == "generator" or several_keras_ranks.keras == "3"  # tf-keras's dropout draws from tf.random
    for rank, (deviation, text) in enumerate(several_keras_ranks.run(bodies.body_eager, kind)):
        times = 1.0 if own else several_keras_ranks.size**0.5
        assert deviation == pytest.approx(times * ONE_PROCESS, rel=0.12)
        assert ("tf.random: is in an eager step" in text) == (rank == 0 and not own)


def test_the_switch(keras_two_ranks: Pool) -> None:
    for deviation in keras_two_ranks.run(bodies.body_switched_off):
        assert deviation == pytest.approx(2**0.5 * ONE_PROCESS, rel=0.12)


def test_the_statement_names_exceptions(keras_two_ranks: Pool) -> None:
    text, others = keras_two_ranks.run(bodies.body_statement)
    assert "random_uniform: decides what the step does" in text
    assert "own_noise" in text and "some_dropout" in text
    [line] = [line for line in text.splitlines() if "not in a checkpoint" in line]
    assert ("some_dropout" in line) == (keras_two_ranks.keras == "2")
    assert others == ""
