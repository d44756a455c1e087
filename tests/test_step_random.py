"""Random numbers in a replicated training step: as many different ones as on one process, and what is drawn once for a
whole batch is the same on all ranks.
"""

from __future__ import annotations

import contextlib
import io
import os
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from compared import same
from heard import settings
from pool import Pool

import npu_device as npu

WIDTH, BATCH, STEPS = 64, 48, 12


def _model(draws: Any, parts: Any, seed: int = 1, **compiled: Any) -> Any:
    """Return a replicated model whose step's gradients are the means of a batch's random numbers: 64 for each draw."""
    keras = tf.keras
    keras.utils.set_random_seed(seed)

    class Model(keras.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            for name, part in parts().items():
                setattr(self, name, part)
            self.denses = [keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros") for _ in draws]

        def call(self, x: Any) -> Any:
            return [dense(x) for dense in self.denses]

        def train_step(self, data: Any) -> Any:
            x, _ = data
            with tf.GradientTape() as tape:
                drawn = [tf.reshape(draw(self, x), [-1, WIDTH]) for draw in draws]
                loss = tf.add_n([tf.reduce_mean(dense(each)) for dense, each in zip(self.denses, drawn)])
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
            return {"loss": loss}

    model = Model()
    model.compile(keras.optimizers.SGD(1.0), **compiled)
    return npu.distribute.replicate(model)


def _fit(model: Any, shape: Any = (WIDTH,)) -> np.ndarray:
    """Train, and return the gradients, [draws, STEPS, WIDTH]."""
    weights = [np.zeros((len(model.denses), WIDTH))]

    class Weights(tf.keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            weights.append(np.stack([np.ravel(dense.get_weights()[0]) for dense in model.denses]))

    ones = np.ones((BATCH * STEPS, *shape), np.float32)
    model.fit(ones, ones[:, :1], batch_size=BATCH, verbose=0, callbacks=[Weights()])
    return np.moveaxis(-np.diff(weights, axis=0), 1, 0)


def _kinds() -> dict[str, tuple[Any, Any]]:
    keras = tf.keras
    layers = keras.layers

    @tf.function
    def inside(x: Any) -> Any:
        return tf.random.normal(tf.shape(x))

    @tf.function
    def loop(x: Any) -> Any:
        total = tf.zeros_like(x)
        for _ in tf.range(4):
            total += tf.random.normal(tf.shape(x)) / 2.0
        return total

    def flip(model: Any, x: Any) -> Any:  # 1 or -1, by half
        images = tf.reshape(x, [-1, WIDTH // 2, 2, 1]) * tf.constant([1.0, -1.0])[None, None, :, None]
        # Each image of two columns is flipped or not: as many images as numbers.
        pairs = tf.reshape(images, [-1, 1, 2, 1])
        return tf.repeat(tf.reshape(model.flip(pairs, training=True), [-1, WIDTH])[:, ::2], 2, axis=1)

    return {
        "tf.random": (lambda model, x: tf.random.normal(tf.shape(x)), dict),
        "dropout": (
            lambda model, x: model.drop(tf.ones_like(x), training=True) - 1.0,
            lambda: {"drop": layers.Dropout(0.5)},
        ),
        "noise": (
            lambda model, x: model.noise(tf.zeros_like(x), training=True),
            lambda: {"noise": layers.GaussianNoise(1.0)},
        ),
        "seeded noise": (
            lambda model, x: model.seeded(tf.zeros_like(x), training=True),
            lambda: {"seeded": layers.GaussianNoise(1.0, seed=3)},
        ),
        "flip": (flip, lambda: {"flip": layers.RandomFlip("horizontal")}),
        "generator": (
            lambda model, x: model.generator.normal(tf.shape(x)),
            lambda: {"generator": tf.random.Generator.from_seed(4)},
        ),
        "keras.random": (lambda model, x: keras.random.normal(tf.shape(x)), dict),
        "function": (lambda model, x: inside(x), dict),
        "loop": (lambda model, x: loop(x), dict),
    }


def body_noise(*kinds: str) -> tuple[dict[str, float], list[Any]]:
    """Return the standard deviations of the gradients of a step that draws numbers of all kinds, by default of those
    that this Keras has; and the states of generators afterwards.
    """
    made = _kinds()
    if not hasattr(tf.keras, "random"):
        del made["keras.random"]
    kinds = kinds or tuple(made)

    def parts() -> dict[str, Any]:
        return {name: part for kind in kinds for name, part in made[kind][1]().items()}

    model = _model([made[kind][0] for kind in kinds], parts)
    return {kind: float(np.std(each)) for kind, each in zip(kinds, _fit(model))}, states_of(model)


def states_of(model: Any) -> list[Any]:
    """Return the states of a model's generators."""
    found = [getattr(model, name, None) for name in ("generator",)]
    for name in ("drop", "noise", "seeded", "flip"):
        layer = getattr(model, name, None)
        found += [getattr(layer, "seed_generator", None), getattr(layer, "generator", None)]
        found.append(getattr(getattr(layer, "_random_generator", None), "_generator", None))
    return [np.asarray(each.state).tolist() for each in found if each is not None]


def body_shared() -> dict[str, Any]:
    """Return the gradients of a step whose random numbers one process draws once for the whole batch, by kind."""
    layers = tf.keras.layers

    def branch_in_loop(model: Any, x: Any) -> Any:
        chance = tf.random.uniform([4])

        def body(row: Any, x: Any) -> Any:
            return row + 1, tf.cond(chance[row] < 0.5, lambda: 2 * x, lambda: x)

        return tf.while_loop(lambda row, _: row < 3, body, [0, x])[1]

    def rounds(model: Any, x: Any) -> Any:
        number = tf.random.uniform([], 1, 4, tf.int32)
        return tf.while_loop(lambda row, _: row < number, lambda row, x: (row + 1, 2 * x), [0, x])[1]

    draws: dict[str, Any] = {
        "branch": lambda model, x: tf.cond(tf.reduce_sum(tf.random.uniform([5])) < 2.5, lambda: x, lambda: -x),
        "branch in a loop": branch_in_loop,
        "rounds of a loop": rounds,
        "kept": lambda model, x: x * model.kept.assign(tf.random.uniform([])),
        "number": lambda model, x: x * tf.random.normal([]),
        "drop path": lambda model, x: model.drop_path(x, training=True),
        "columns": lambda model, x: model.columns(x, training=True),
        "weights": lambda model, x: x + tf.reshape(tf.random.normal([WIDTH, 1]), [1, -1]),
    }
    parts = {
        "drop_path": lambda: layers.Dropout(0.5, noise_shape=(1, 1)),
        "columns": lambda: layers.Dropout(0.5, noise_shape=(1, WIDTH)),
        "kept": lambda: tf.Variable(0.0, trainable=False),
    }

    return dict(zip(draws, _fit(_model(draws.values(), lambda: {name: part() for name, part in parts.items()}))))


def body_switched_off() -> float:
    """Return what ``body_noise`` returns for ``tf.random``, with ``NPU_DEVICE_STEP_RANDOM=same``."""
    with settings(NPU_DEVICE_STEP_RANDOM="same"):
        return body_noise("dropout")[0]["dropout"]


def body_outside() -> Any:
    """Return what is drawn outside of steps, before, between and after them: the same on all ranks."""

    def numbers() -> list[float]:
        return [float(tf.random.normal([])), float(tf.random.get_global_generator().normal([]))]

    @tf.function
    def traced() -> Any:
        return tf.random.normal([])

    tf.random.set_global_generator(tf.random.Generator.from_seed(8))
    draw, parts = _kinds()["tf.random"]
    model = _model([draw], parts)
    found = numbers()

    class Between(tf.keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            found.extend(numbers())

    ones = tf.data.Dataset.from_tensors(tf.ones((BATCH, WIDTH))).repeat(2)
    noisy = ones.map(lambda x: (x + tf.random.normal(tf.shape(x)), x[:, :1]))
    model.fit(noisy, verbose=0, callbacks=[Between()])
    found.extend(float(tf.reduce_sum(x)) for x, _ in noisy)
    return [*found, *numbers(), float(traced())]


def body_eager(kind: str) -> Any:
    """Return the standard deviation of the gradients of a model that runs eagerly, and what is written meanwhile."""
    draw, parts = _kinds()[kind]
    written = io.StringIO()
    with contextlib.redirect_stderr(written):
        deviation = float(np.std(_fit(_model([draw], parts, run_eagerly=True))))
    return deviation, written.getvalue()


def body_statement() -> str:
    """Return what rank 0 writes about the random numbers of a step."""

    @tf.function
    def inside(x: Any) -> Any:
        return tf.cond(tf.random.uniform([], name="coin") < 0.5, lambda: x, lambda: -x)

    def draw(model: Any, x: Any) -> Any:
        x = tf.cond(tf.random.uniform([]) < 0.5, lambda: x, lambda: -x)
        return model.drop(inside(x), training=True) + tf.random.normal(tf.shape(x), name="own_noise")

    os.environ.pop("NPU_DEVICE_STATEMENT", None)
    written = io.StringIO()
    with contextlib.redirect_stderr(written):
        _fit(_model([draw], lambda: {"drop": tf.keras.layers.Dropout(0.5, name="some_dropout")}))
    return written.getvalue()


ONE_PROCESS = BATCH**-0.5
"""The standard deviation of the mean of a batch's numbers."""


def test_noise_is_that_of_one_process(several_keras_ranks: Pool, keras_single: Pool) -> None:
    """Of each kind, in one step. Layers have the states that they have on one process, too."""
    [(alone, states)] = keras_single.run(body_noise)
    assert len(alone) == (9 if several_keras_ranks.keras == "3" else 8)
    ranks = several_keras_ranks.run(body_noise)
    for found, own_states in ranks:
        # 1.41 or 1.73 times as large without
        assert found == pytest.approx(dict.fromkeys(alone, ONE_PROCESS), rel=0.12)
        assert own_states == ranks[0][1]
        assert own_states[1:] == states[1:]  # the first is that of a generator, which draws for a share


def test_one_draw_for_the_batch_is_that_of_one_process(several_keras_ranks: Pool, keras_single: Pool) -> None:
    [alone] = keras_single.run(body_shared)
    for rank in several_keras_ranks.run(body_shared):
        same(rank, alone)
    for kind, gradients in alone.items():
        assert np.ptp(gradients) > 0.5, kind  # it is drawn at all


def test_outside_of_steps_all_ranks_draw_the_same(several_keras_ranks: Pool) -> None:
    ranks = several_keras_ranks.run(body_outside)
    assert all(rank == ranks[0] for rank in ranks)


@pytest.mark.parametrize("kind", ["dropout", "generator"])
def test_eager_steps(several_keras_ranks: Pool, kind: str) -> None:
    own = kind == "generator" or several_keras_ranks.keras == "3"  # tf-keras's dropout draws from tf.random
    for rank, (deviation, text) in enumerate(several_keras_ranks.run(body_eager, kind)):
        times = 1.0 if own else several_keras_ranks.size**0.5
        assert deviation == pytest.approx(times * ONE_PROCESS, rel=0.12)
        assert ("tf.random: is in an eager step" in text) == (rank == 0 and not own)


def test_the_switch(keras_two_ranks: Pool) -> None:
    for deviation in keras_two_ranks.run(body_switched_off):
        assert deviation == pytest.approx(2**0.5 * ONE_PROCESS, rel=0.12)


def test_the_statement_names_exceptions(keras_two_ranks: Pool) -> None:
    text, others = keras_two_ranks.run(body_statement)
    assert "random_uniform: decides what the step does" in text
    assert "own_noise" in text and "some_dropout" in text
    [line] = [line for line in text.splitlines() if "each rank decides" in line]
    assert "coin: in a function that the step calls" in line
    [line] = [line for line in text.splitlines() if "not in a checkpoint" in line]
    assert ("some_dropout" in line) == (keras_two_ranks.keras == "2")
    assert others == ""
