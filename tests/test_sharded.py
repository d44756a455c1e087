"""``grouping_gradients_apply`` and ``grouping_broadcast``: a sharded update equals the plain one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from heard import error_of
from pool import Pool

import npu_device as npu


def body_apply(graph: bool) -> Any:
    def train(sharded: bool) -> Any:
        variables = [tf.Variable(tf.fill(shape, 1.0)) for shape in ([3, 2], [5], [], [4, 4], [2])]
        optimizer = tf.keras.optimizers.Adam(0.1)

        def step(scale: Any) -> None:
            gradients = [tf.ones(v.shape) * (i + 1.0) * scale for i, v in enumerate(variables)]
            pairs = list(zip(gradients, variables))
            if sharded:
                npu.distribute.grouping_gradients_apply(optimizer.apply_gradients, pairs)
            else:
                optimizer.apply_gradients(pairs)

        call = tf.function(step) if graph else step
        for scale in (1.0, -0.5, 2.0):
            call(tf.constant(scale))
        state = optimizer.variables() if callable(optimizer.variables) else optimizer.variables
        return [v.numpy() for v in variables], sum(int(np.prod(v.shape)) for v in state if len(v.shape))

    sharded, sharded_state = train(True)
    plain, plain_state = train(False)
    same = [np.array_equal(a, b) for a, b in zip(sharded, plain)]
    return same, sharded_state, plain_state


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
def test_equal_to_the_plain_update(keras_ranks: Pool, graph: bool) -> None:
    results = keras_ranks.run(body_apply, graph)
    for same, state, plain_state in results:
        assert all(same)
        if keras_ranks.size > 1:
            assert state < plain_state, "the optimizer's state is sharded"
    assert sum(state for _, state, _ in results) == results[0][2], "each rank holds its own share of the state"


def body_refused() -> list[str]:
    keras = tf.keras
    scaling = getattr(keras.optimizers, "LossScaleOptimizer", None) or keras.mixed_precision.LossScaleOptimizer
    found = []
    for optimizer in (keras.optimizers.Adam(0.1, global_clipnorm=1.0), scaling(keras.optimizers.SGD(0.1))):
        pairs = [(tf.ones([]), tf.Variable(1.0)) for _ in range(4)]
        found.append(error_of(npu.distribute.grouping_gradients_apply, optimizer.apply_gradients, pairs))
    return [*found, error_of(npu.distribute.grouping_broadcast, [tf.Variable([1.0])])]


def test_what_cannot_be_divided_is_refused(keras_two_ranks: Pool) -> None:
    for clips, scales, single in keras_two_ranks.run(body_refused):
        assert "clips by global_clipnorm, for which it needs all gradients" in clips
        assert "scales the loss, for which it needs all gradients" in scales
        assert "can't be divided among" in single
