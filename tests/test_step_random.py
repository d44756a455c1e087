"""Random numbers in a replicated training step: as many different ones as on one process, and what is drawn once for a
whole batch is the same on all ranks.
"""

from __future__ import annotations

import contextlib
import io
import os
import random
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from caught_messages import settings
from fit_models import descend
from pool import Pool
from rank_comparison import same

import npu_device as npu

WIDTH, BATCH, STEPS = 64, 48, 12


def _model(kinds: dict[str, tuple[Any, Any]], **compiled: Any) -> Any:
    """Return a replicated model whose step's gradients are the means of a batch's random numbers: 64 for each draw.

    ``kinds`` has, for each draw, what makes it from a part of the model and its inputs, and what makes the part.
    """
    keras = tf.keras
    keras.utils.set_random_seed(1)

    class Model(keras.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.parts = [make() for _, make in kinds.values()]
            self.denses = [
                keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros") for _ in kinds
            ]

        def call(self, x: Any) -> Any:
            return [dense(x) for dense in self.denses]

        def train_step(self, data: Any) -> Any:
            def loss() -> Any:
                drawn = [draw(part, data[0]) for (draw, _), part in zip(kinds.values(), self.parts)]
                each = [
                    dense(tf.reshape(one, [-1, WIDTH])) for dense, one in zip(self.denses, drawn)
                ]
                return tf.add_n([tf.reduce_mean(out) for out in each])

            return {"loss": descend(self, loss)}

    model = Model()
    model.compile(keras.optimizers.SGD(1.0), **compiled)
    return npu.distribute.replicate(model)


def _fit(model: Any) -> np.ndarray:
    """Train, and return the gradients, [draws, STEPS, WIDTH]."""
    weights = [np.zeros((len(model.denses), WIDTH))]

    def take(batch: int, logs: Any) -> None:
        weights.append(np.stack([np.ravel(dense.get_weights()[0]) for dense in model.denses]))

    takes = tf.keras.callbacks.LambdaCallback(on_train_batch_end=take)
    ones = np.ones((BATCH * STEPS, WIDTH), np.float32)
    with settings(NPU_DEVICE_FIRST_STEP_CHECK="off"):
        model.fit(ones, ones[:, :1], batch_size=BATCH, verbose=0, callbacks=[takes])
    return np.moveaxis(-np.diff(weights, axis=0), 1, 0)


def _kinds() -> dict[str, tuple[Any, Any]]:
    keras = tf.keras
    layers = keras.layers

    inside = tf.function(lambda x: tf.random.normal(tf.shape(x)))

    @tf.function
    def loop(x: Any) -> Any:
        total = tf.zeros_like(x)
        for _ in tf.range(4):
            total += tf.random.normal(tf.shape(x)) / 2.0
        return total

    def flip(layer: Any, x: Any) -> Any:  # 1 or -1, by half
        images = (
            tf.reshape(x, [-1, WIDTH // 2, 2, 1]) * tf.constant([1.0, -1.0])[None, None, :, None]
        )
        # Each image of two columns is flipped or not: as many images as numbers.
        pairs = tf.reshape(images, [-1, 1, 2, 1])
        return tf.repeat(tf.reshape(layer(pairs, training=True), [-1, WIDTH])[:, ::2], 2, axis=1)

    def noise(layer: Any, x: Any) -> Any:
        return layer(tf.zeros_like(x), training=True)

    made: dict[str, tuple[Any, Any]] = {
        "tf.random": (lambda _, x: tf.random.normal(tf.shape(x)), int),
        "dropout": (
            lambda layer, x: layer(tf.ones_like(x), training=True) - 1.0,
            lambda: layers.Dropout(0.5),
        ),
        "noise": (noise, lambda: layers.GaussianNoise(1.0)),
        "seeded noise": (noise, lambda: layers.GaussianNoise(1.0, seed=3)),
        "flip": (flip, lambda: layers.RandomFlip("horizontal")),
        "generator": (
            lambda made, x: made.normal(tf.shape(x)),
            lambda: tf.random.Generator.from_seed(4),
        ),
        "function": (lambda _, x: inside(x), int),
        "loop": (lambda _, x: loop(x), int),
    }
    if hasattr(keras, "random"):
        made["keras.random"] = (lambda _, x: keras.random.normal(tf.shape(x)), int)
    return made


def body_noise() -> tuple[dict[str, float], dict[str, list[Any]]]:
    """Return the standard deviations of the gradients of a step that draws numbers of all kinds that this Keras has;
    and the states of generators afterwards.
    """
    made = _kinds()
    model = _model(made)
    found = {kind: float(np.std(each)) for kind, each in zip(made, _fit(model))}
    states = {}
    for kind, part in zip(made, model.parts):
        own = getattr(getattr(part, "_random_generator", None), "_generator", None)
        each = [part, getattr(part, "seed_generator", None), getattr(part, "generator", None), own]
        states[kind] = [np.asarray(one.state).tolist() for one in each if hasattr(one, "state")]
    return found, states


def body_shared() -> dict[str, Any]:
    """Return the gradients of a step whose random numbers one process draws once for the whole batch, by kind."""
    layers = tf.keras.layers

    def branch_in_loop(_: Any, x: Any) -> Any:
        chance = tf.random.uniform([4])

        def body(row: Any, x: Any) -> Any:
            return row + 1, tf.cond(chance[row] < 0.5, lambda: 2 * x, lambda: x)

        return tf.while_loop(lambda row, _: row < 3, body, [0, x])[1]

    def rounds(_: Any, x: Any) -> Any:
        number = tf.random.uniform([], 1, 4, tf.int32)
        return tf.while_loop(lambda row, _: row < number, lambda row, x: (row + 1, 2 * x), [0, x])[
            1
        ]

    def dropout(width: int) -> tuple[Any, Any]:
        return lambda layer, x: layer(x, training=True), lambda: layers.Dropout(
            0.5, noise_shape=(1, width)
        )

    kinds: dict[str, tuple[Any, Any]] = {
        "branch": (
            lambda _, x: tf.cond(
                tf.reduce_sum(tf.random.uniform([5])) < 2.5, lambda: x, lambda: -x
            ),
            int,
        ),
        "branch in a loop": (branch_in_loop, int),
        "rounds of a loop": (rounds, int),
        "kept": (
            lambda kept, x: x * kept.assign(tf.random.uniform([])),
            lambda: tf.Variable(0.0, trainable=False),
        ),
        "number": (lambda _, x: x * tf.random.normal([]), int),
        "drop path": dropout(1),
        "columns": dropout(WIDTH),
        "weights": (lambda _, x: x + tf.reshape(tf.random.normal([WIDTH, 1]), [1, -1]), int),
    }
    return dict(zip(kinds, _fit(_model(kinds))))


def body_outside() -> Any:
    """Return what is drawn outside of steps, before, between and after them: the same on all ranks."""

    def numbers() -> list[float]:
        return [float(tf.random.normal([])), float(tf.random.get_global_generator().normal([]))]

    traced = tf.function(lambda: tf.random.normal([]))
    tf.random.set_global_generator(tf.random.Generator.from_seed(8))
    model = _model({"noise": _kinds()["tf.random"]})
    found = numbers()
    if hasattr(tf.keras, "random"):
        # Keras 3 draws from a generator of its own, which begins with a number of Python's.
        random.seed(npu.distribute.rank())
        tf.keras.random.uniform([])
    between = tf.keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: found.extend(numbers())
    )
    ones = tf.data.Dataset.from_tensors(tf.ones((BATCH, WIDTH))).repeat(2)
    noisy = ones.map(lambda x: (x + tf.random.normal(tf.shape(x)), x[:, :1]))
    model.fit(noisy, verbose=0, callbacks=[between])
    found.extend(float(tf.reduce_sum(x)) for x, _ in noisy)
    if hasattr(tf.keras, "random"):
        found.append(float(tf.keras.random.uniform([])))
    return [*found, *numbers(), float(traced())]


def body_chosen(kinds: tuple[str, ...], setting: str, run_eagerly: bool) -> tuple[list[float], str]:
    """Return the standard deviations of the gradients of a model that draws in some ways, and what is written
    meanwhile, with a value of ``NPU_DEVICE_STEP_RANDOM``.
    """
    written = io.StringIO()
    with contextlib.redirect_stderr(written), settings(NPU_DEVICE_STEP_RANDOM=setting):
        found = _fit(_model({kind: _kinds()[kind] for kind in kinds}, run_eagerly=run_eagerly))
    return [float(np.std(each)) for each in found], written.getvalue()


def body_statement() -> str:
    """Return what rank 0 writes about the random numbers of a step."""

    inside = tf.function(
        lambda x: tf.cond(tf.random.uniform([], name="coin") < 0.5, lambda: x, lambda: -x)
    )

    def draw(layer: Any, x: Any) -> Any:
        x = tf.cond(tf.random.uniform([]) < 0.5, lambda: x, lambda: -x)
        return layer(inside(x), training=True) + tf.random.normal(tf.shape(x), name="own_noise")

    os.environ.pop("NPU_DEVICE_STATEMENT", None)
    written = io.StringIO()
    with contextlib.redirect_stderr(written):
        _fit(_model({"all": (draw, lambda: tf.keras.layers.Dropout(0.5, name="some_dropout"))}))
    return written.getvalue()


ONE_PROCESS = BATCH**-0.5  # the standard deviation of the mean of a batch's numbers


def test_noise_is_that_of_one_process(keras_two_ranks: Pool, keras_single: Pool) -> None:
    """Of each kind, in one step. Layers have the states that they have on one process, too."""
    [(alone, states)] = keras_single.run(body_noise)
    assert len(alone) == (9 if keras_two_ranks.keras == "3" else 8)
    (first, own_states), (second, others) = keras_two_ranks.run(body_noise)
    for found in (first, second):
        # 1.41 times as large without
        assert found == pytest.approx(dict.fromkeys(alone, ONE_PROCESS), rel=0.12)
    assert own_states == others
    del own_states["generator"], states["generator"]  # which draws for a share
    assert own_states == states and any(states.values())


@pytest.mark.once
def test_one_draw_for_the_batch_is_that_of_one_process(
    keras_two_ranks: Pool, keras_single: Pool
) -> None:
    [alone] = keras_single.run(body_shared)
    for rank in keras_two_ranks.run(body_shared):
        same(rank, alone)
    for kind, gradients in alone.items():
        assert np.ptp(gradients) > 0.5, kind  # it is drawn at all


def test_outside_of_steps_all_ranks_draw_the_same(keras_two_ranks: Pool) -> None:
    first, second = keras_two_ranks.run(body_outside)
    assert first == second


def test_eager_steps_draw_different_numbers_on_each_rank(several_keras_ranks: Pool) -> None:
    own = several_keras_ranks.keras == "3"  # tf-keras's dropout draws from tf.random
    times = 1.0 if own else several_keras_ranks.size**0.5
    for rank, found in enumerate(
        several_keras_ranks.run(body_chosen, ("dropout", "generator"), "own", True)
    ):
        (dropout, generator), text = found
        assert dropout == pytest.approx(times * ONE_PROCESS, rel=0.12)
        assert generator == pytest.approx(ONE_PROCESS, rel=0.12)
        assert ("tf.random: is in an eager step" in text) == (rank == 0 and not own)


@pytest.mark.once
def test_the_switch_makes_all_ranks_draw_the_same_numbers(keras_two_ranks: Pool) -> None:
    for [deviation], _ in keras_two_ranks.run(body_chosen, ("dropout",), "same", False):
        assert deviation == pytest.approx(2**0.5 * ONE_PROCESS, rel=0.12)


def test_a_statement_names_random_numbers_that_are_not_of_the_rank(keras_two_ranks: Pool) -> None:
    text, others = keras_two_ranks.run(body_statement)
    assert "random_uniform: decides what the step does" in text
    assert "own_noise" in text and "some_dropout" in text
    [line] = [line for line in text.splitlines() if "each rank decides" in line]
    assert "coin: in a function that the step calls" in line
    [line] = [line for line in text.splitlines() if "not in a checkpoint" in line]
    assert ("some_dropout" in line) == (keras_two_ranks.keras == "2")
    assert others == ""
