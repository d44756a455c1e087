"""The order of production that is read off the graph, against when the gradients were measured to be ready."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from pool import Pool

WIDTH = 384
BATCH = 512
RUNS = 9
TOLERANCE = 0.4
"""Of the time from the first gradient to the last one; on a busy machine neighbours change places."""


def _dense(tf: Any, name: str) -> Any:
    return tf.Variable(tf.random.stateless_normal([WIDTH, WIDTH], [1, 2]) / WIDTH**0.5, name=name)


def _chain(tf: Any, x: Any, layers: list[Any]) -> Any:
    for weights in layers:
        x = tf.tanh(x @ weights)
    return x


def _model(tf: Any, kind: str) -> tuple[Any, list[Any]]:
    """A loss as a function of x, and the variables in the order in which a script would list them."""
    w = [_dense(tf, f"w{i}") for i in range(6)]
    if kind == "chain":
        return lambda x: tf.reduce_sum(_chain(tf, x, w)), w
    if kind == "shuffled list":
        return lambda x: tf.reduce_sum(_chain(tf, x, w)), [w[i] for i in (3, 0, 5, 1, 4, 2)]
    if kind == "shared layer":
        # w[1] is used at the bottom and at the top: its gradient is there only when backward has come to the bottom.
        return lambda x: tf.reduce_sum(_chain(tf, x, [w[0], w[1], w[2], w[3], w[4], w[1], w[5]])), w
    if kind == "frozen layers":
        return lambda x: tf.reduce_sum(_chain(tf, x, w)), [w[0], w[2], w[5]]
    if kind == "branches":
        # A short branch beside a long one: the short one's bottom is there before the long one's.
        long, short = w[:5], w[5:]
        return lambda x: tf.reduce_sum(_chain(tf, x, long)) + tf.reduce_sum(_chain(tf, x, short)), [*short, *long]
    raise ValueError(kind)


def body_order(kind: str, scaled: bool) -> Any:
    import tensorflow as tf

    from npu_device._src.gradients.segments import production_order

    loss_of, variables = _model(tf, kind)
    ready: dict[int, list[float]] = {i: [] for i in range(len(variables))}
    orders: list[list[int]] = []

    def note(position: int) -> Any:
        def now(gradient: Any) -> Any:
            ready[position].append(time.perf_counter())
            return np.float32(0)

        return now

    @tf.function
    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = loss_of(x)
        gradients = tape.gradient(loss, variables)
        if scaled:
            gradients = [gradient / 8.0 for gradient in gradients]
        orders.append(production_order(gradients))
        # Not stateful: TensorFlow would run these one after the other in the order of the list.
        return [
            tf.numpy_function(note(i), [gradient[0, 0]], tf.float32, stateful=False)
            for i, gradient in enumerate(gradients)
        ]

    x = tf.random.stateless_normal([BATCH, WIDTH], [3, 4])
    for _ in range(RUNS + 1):
        step(x)
    times = np.array([ready[i][1:] for i in range(len(variables))])
    times = np.median(times - times.min(axis=0), axis=1)
    return orders[0], times.tolist()


@pytest.mark.parametrize("scaled", [False, True], ids=["", "scaled one by one"])
@pytest.mark.parametrize("kind", ["chain", "shuffled list", "shared layer", "frozen layers", "branches"])
def test_against_what_was_ready_first(single: Pool, kind: str, scaled: bool) -> None:
    [(order, times)] = single.run(body_order, kind, scaled)
    if kind == "shared layer":
        assert order[-1] in (0, 1) and order[-2] in (0, 1), "the shared layer waits for its lowest use"
    along = np.array([times[position] for position in order]) / max(times)
    # What is ready at about the same moment may come in either order; nothing may stand far from its place.
    for position, moment in enumerate(along):
        assert np.all(along[position + 1 :] > moment - TOLERANCE), (order, times)
    assert along[0] < TOLERANCE and along[-1] > 1 - TOLERANCE, (order, times)


def body_eager() -> Any:
    import tensorflow as tf

    from npu_device._src.gradients.segments import production_order

    loss_of, variables = _model(tf, "shuffled list")
    with tf.GradientTape() as tape:
        loss = loss_of(tf.ones([2, WIDTH]))
    gradients = tape.gradient(loss, variables)
    return production_order(gradients), production_order([gradient * 2.0 for gradient in gradients])


def test_eager_gradients(single: Pool) -> None:
    [(made, made_over)] = single.run(body_eager)
    # The list is w3 w0 w5 w1 w4 w2; backward makes w5 first.
    assert made == [2, 4, 0, 5, 3, 1]
    assert made_over == [5, 4, 3, 2, 1, 0]
