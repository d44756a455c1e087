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


def test_noise_is_that_of_one_process(several_keras_ranks: Pool, keras_single: Pool) -> None:
    """Of each kind, in one step. Layers have the states that they have on one process, too."""
    [(alone, states)] = keras_single.run(bodies.body_noise)
    assert len(alone) == (9 if several_keras_ranks.keras == "3" else 8)
    ranks = several_keras_ranks.run(bodies.body_noise)
    for found, own_states in ranks:
        # 1.41 or 1.73 times as large without
        assert found == pytest.approx(dict.fromkeys(alone, ONE_PROCESS), rel=0.12)
        assert own_states == ranks[0][1]
        assert own_states[1:] == states[1:]  # the first is that of a generator, which draws for a share


def test_one_draw_for_the_batch_is_that_of_one_process(several_keras_ranks: Pool, keras_single: Pool) -> None:
    [alone] = keras_single.run(bodies.body_shared)
    for rank in several_keras_ranks.run(bodies.body_shared):
        same(rank, alone)
    for kind, gradients in alone.items():
        assert np.ptp(gradients) > 0.5, kind  # it is drawn at all


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
