"""``gradient_accumulation_steps``: N ranks that each add up gradients, and reduce their sum in each update, do what one
process does with the same number of steps.
"""

from __future__ import annotations

from typing import Any, Callable

import numpy as np
import pytest
import tensorflow as tf
from compared import same, same_bits
from pool import Pool

import npu_device as npu

pytestmark = pytest.mark.only_keras("3")

STEPS = 3
TOLERANCE = 5e-6  # of weights of order one after some ten steps, float32
OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "momentum": lambda **more: tf.keras.optimizers.SGD(0.1, momentum=0.9, **more),
    "clipped": lambda **more: tf.keras.optimizers.SGD(1.0, global_clipnorm=0.05, **more),
    "scaled": lambda **more: tf.keras.optimizers.SGD(0.1, loss_scale_factor=3.0, **more),
    "averaged": lambda **more: tf.keras.optimizers.AdamW(0.01, use_ema=True, **more),
}
wrap = npu.distribute.DistributedOptimizer


def make_optimizer(kind: str) -> Any:
    return OPTIMIZERS[kind](gradient_accumulation_steps=STEPS)


def make_model() -> Any:
    keras = tf.keras
    keras.utils.set_random_seed(1)
    return keras.Sequential(
        [keras.Input([5]), keras.layers.Dense(7, activation="tanh"), keras.layers.Dense(1)]
    )


def samples_of(step: int, ranks: range) -> tuple[Any, Any]:
    """Return the samples of some ranks in a step: four each."""
    numbers = [np.random.default_rng([step, rank]).standard_normal([4, 5]) for rank in ranks]
    x = np.concatenate(numbers).astype(np.float32)
    return tf.constant(x), tf.constant(3 * x.sum(axis=1, keepdims=True))


def train(model: Any, optimizer: Any, ranks: range, steps: range, graph: bool, by: str) -> None:
    variables = model.trainable_variables

    def step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x, training=True) - y))
            loss = loss / tf.cast(tf.shape(x)[0], tf.float32) if by == "sum" else loss
            loss = optimizer.scale_loss(loss)
        gradients = tape.gradient(loss, variables)
        if by == "lists":
            optimizer.apply(gradients, variables)
        else:
            optimizer.apply_gradients(zip(gradients, variables))

    call = tf.function(step) if graph else step
    for number in steps:
        call(*samples_of(number, ranks))


def outcome(model: Any, optimizer: Any) -> dict[str, Any]:
    """Return what is equal on all ranks."""
    averages = getattr(optimizer, "_model_variables_moving_average", [])
    return {
        "weights": model.get_weights(),
        "averages": [variable.numpy() for variable in averages],
        "steps": int(optimizer._iterations),
    }


def body_loop(kind: str, graph: bool, by: str) -> Any:
    rank, size = npu.distribute.rank(), npu.distribute.size()
    model, optimizer = make_model(), make_optimizer(kind)
    wrap(optimizer, "sum" if by == "sum" else "mean")
    train(model, optimizer, range(rank, rank + 1), range(3 * STEPS + 2), graph, by)
    alone, single = make_model(), make_optimizer(kind)
    # By sum, N ranks of 4 samples each add up what is a mean over 4.
    train(alone, single, range(size), range(3 * STEPS + 2), True, "lists")
    found = outcome(model, optimizer)
    same(found, outcome(alone, single), TOLERANCE)
    assert np.abs(found["weights"][0] - make_model().get_weights()[0]).max() > 0.003
    return found


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize(
    ("kind", "by"),
    [("momentum", "lists"), ("clipped", "pairs"), ("scaled", "lists"), ("averaged", "pairs")],
)
def test_a_loop_equals_one_process(keras_ranks: Pool, kind: str, by: str, graph: bool) -> None:
    same_bits(*keras_ranks.run(body_loop, kind, graph, by))
