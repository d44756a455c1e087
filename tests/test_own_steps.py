"""Replicated models whose steps hide something: losses per sample, tensors of other lengths, optimizers and variables
that Keras doesn't know, sizes that they rely on, a class's own ``fit``. The results are those of one process, or a
message says what can't be divided.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from compared import compare
from fit_models import descend, outcome, samples
from heard import error_of, settings
from pool import Pool

import npu_device as npu
from npu_device._src.training.fit import start
from npu_device._src.training.world import world


def _model(step: Any = None, *more: Any) -> Any:
    """A model of two dense layers with ``more`` in between, and a train step."""
    keras = tf.keras
    keras.utils.set_random_seed(3 + npu.distribute.rank())
    inputs = keras.Input([6])
    hidden = keras.layers.Dense(4, activation="tanh")(inputs)
    for layer in more:
        hidden = layer(hidden)
    base = keras.Model if step is None else type("OwnStep", (keras.Model,), {"train_step": step})
    return base(inputs, keras.layers.Dense(1, name="last")(hidden))


def _mean_step(self: Any, data: Any) -> Any:
    x, y = data
    return {"loss": descend(self, lambda: tf.reduce_mean((self(x, training=True) - y) ** 2))}


def _data(count: int = 41) -> tuple[np.ndarray, np.ndarray]:
    x, y = samples(count)
    return x, y[:, None].astype(np.float32)


def body_losses(kind: str) -> Any:
    """Losses that have one value per sample, or are sums over samples. A batch has a last one of a single sample."""
    keras = tf.keras

    class PerSample(keras.layers.Layer):  # type: ignore[misc]
        def call(self, values: Any) -> Any:
            self.add_loss(0.1 * tf.reduce_mean(values**2, axis=-1))
            return values

    keras.utils.set_random_seed(7)  # layers draw the seeds of their initial values when they are made
    more = []
    if kind.startswith("added"):
        more = [PerSample()]
    elif kind == "activity":
        more = [keras.layers.Dense(3, activity_regularizer=keras.regularizers.L2(0.01))]
    model = _model(None, *more)
    loss: Any = "mse"
    if kind == "added alone":
        loss = None
    elif kind == "not reduced":
        loss = keras.losses.MeanSquaredError(reduction="none")
    model.compile(keras.optimizers.SGD(0.01), loss)
    model = npu.distribute.replicate(model)
    x, y = _data()
    history = model.fit(x, y, batch_size=10, epochs=2, shuffle=False, verbose=0)
    scores = model.evaluate(x, y, batch_size=10, verbose=0)
    return outcome(model, history, scores=np.asarray(scores))


def body_two_lengths() -> Any:
    """40 unlabelled and 10 labelled samples a batch; then 8 and 2, so that some ranks have none; then 8 and 5."""

    def step(self: Any, data: Any) -> Any:
        free, (x, y) = data

        def loss() -> Any:
            return tf.reduce_mean((self(x, training=True) - y) ** 2) + 0.1 * tf.reduce_mean(self(free) ** 2)

        return {"loss": descend(self, loss)}

    free, _ = _data(56)
    x, y = samples(17)
    sizes = [(40, 10), (8, 2), (8, 5)]

    def batches() -> Any:
        first = second = 0
        for one, other in sizes:
            labelled = slice(second, second + other)
            yield free[first : first + one], (x[labelled], y[labelled, None].astype(np.float32))
            first, second = first + one, second + other

    number = tf.TensorSpec([None, 6], tf.float32)
    spec = (number, (number, tf.TensorSpec([None, 1], tf.float32)))
    model = _model(step)
    model.compile(tf.keras.optimizers.SGD(0.1))
    model = npu.distribute.replicate(model)
    history = model.fit(tf.data.Dataset.from_generator(batches, output_signature=spec), epochs=2, verbose=0)
    if history.history["loss"] == [0.0, 0.0]:  # in Keras 3, of a loss tracker that the step doesn't use
        del history.history["loss"]
    return outcome(model, history)


def body_optimizers(kind: str) -> Any:
    """Optimizers that aren't attributes of the model."""
    keras = tf.keras
    optimizers = [keras.optimizers.SGD(0.05), keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(0.02, 9))]
    if kind == "legacy":
        schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)
        optimizers = [keras.optimizers.legacy.SGD(schedule), keras.optimizers.legacy.Adam(0.01)]
    keras.utils.set_random_seed(3 + npu.distribute.rank())

    class Holder:
        def __init__(self) -> None:
            self.second = (optimizers[1],)

    class Pair(keras.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.encoder = keras.Sequential([keras.Input([6]), keras.layers.Dense(4, "tanh")])
            self.decoder = keras.Sequential([keras.Input([4]), keras.layers.Dense(6)])
            if kind in ("parts", "legacy"):
                self.encoder.compile(optimizer=optimizers[0])
                self.decoder.compile(optimizer=optimizers[1])
            elif kind == "dictionary and object":
                self.held = {"of": {"the": [optimizers[0]]}, "other": Holder()}

        def chosen(self) -> Any:
            if kind in ("parts", "legacy"):
                return self.encoder.optimizer, self.decoder.optimizer
            if kind == "dictionary and object":
                return self.held["of"]["the"][0], self.held["other"].second[0]
            return optimizers  # a closure

        def train_step(self, data: Any) -> Any:
            x = data[0] if isinstance(data, tuple) else data
            with tf.GradientTape(persistent=True) as tape:
                loss = tf.reduce_mean((self.decoder(self.encoder(x)) - x) ** 2)
            for part, optimizer in zip((self.encoder, self.decoder), self.chosen()):
                variables = part.trainable_variables
                optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
            return {"out": loss}

    model = Pair()
    model.compile()
    model = npu.distribute.replicate(model)
    x, _ = samples(41)
    return outcome(model, model.fit(x, batch_size=10, epochs=2, shuffle=False, verbose=0))


def body_step(kind: str) -> Any:
    """Other trainings with a step of the script's own."""
    keras = tf.keras
    more: dict[str, Any] = {}
    x, y = _data()
    batch, step = 10, _mean_step
    if kind == "synchronised":
        model = _model(step, keras.layers.BatchNormalization(synchronized=True, momentum=0.8))
    elif kind == "variable":
        moved = tf.Variable(0.0, trainable=False)

        def step(self: Any, data: Any) -> Any:
            moved.assign(0.5 * moved + tf.reduce_mean(data[0][:, 0]))
            return _mean_step(self, data)

        model = _model(step)
        more["moved"] = moved
    elif kind == "static size":
        x, y, batch = x[:36], y[:36], 6

        def step(self: Any, data: Any) -> Any:
            return _mean_step(self, (data[0] + tf.zeros((data[0].shape[0], 6)), data[1]))

        model = _model(step)
    elif kind == "a part for testing only":

        def step(self: Any, data: Any) -> Any:
            x, y = data
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
            variables = self.get_layer("last").trainable_variables  # tf-keras can't list all of them
            self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
            return {"loss": loss}

        def test_step(self: Any, data: Any) -> Any:
            return {"loss": tf.reduce_mean((self(self.before(data[0])) - data[1]) ** 2)}

        model = _model(step)
        model.before = keras.Sequential([keras.layers.Dropout(0.1), keras.layers.BatchNormalization()])
        type(model).test_step = test_step
    else:
        assert kind == "of another model"  # whose step is part of this one's
        inner = npu.distribute.replicate(_model(step))
        inner.compile(keras.optimizers.SGD(0.1))

        def step(self: Any, data: Any) -> Any:
            return inner.train_step(data)

        model = type("Outer", (keras.Model,), {"train_step": step})(inner.inputs, inner.outputs)
    model.compile(keras.optimizers.SGD(0.1))
    model = npu.distribute.replicate(model)
    data: Any = tf.data.Dataset.from_tensor_slices((x, y)).batch(batch, drop_remainder=kind == "static size")
    tests = data if kind == "a part for testing only" else None
    history = model.fit(data, epochs=2, verbose=0, validation_data=tests)
    return outcome(model, history, **{key: float(value) for key, value in more.items()})


def body_float64() -> Any:
    """A model and data of float64, with weights that no binary number is equal to."""
    keras = tf.keras
    policies = keras.mixed_precision
    before = keras.backend.floatx(), policies.global_policy()
    keras.backend.set_floatx("float64")
    policies.set_global_policy("float64")
    try:
        model = _model()
        model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"])
        x, y = _data(47)
        model = npu.distribute.replicate(model)
        x, y = x.astype(np.float64), y.astype(np.float64)
        history = model.fit(x, y, batch_size=12, epochs=3, shuffle=False, verbose=0)
        return outcome(model, history)
    finally:
        keras.backend.set_floatx(before[0])
        policies.set_global_policy(before[1])


def body_own_fit(names: str) -> list[bool]:
    """Return in which epochs a callback that writes ran, in a model whose class has a ``fit`` that passes all on."""
    keras = tf.keras
    ran = []

    class Log(keras.callbacks.CSVLogger):  # type: ignore[misc]
        def on_train_begin(self, logs: Any = None) -> None:
            ran.append(True)

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            ran.append("val_loss" in logs)

        def on_train_end(self, logs: Any = None) -> None:
            pass

    class Own(keras.Sequential):  # type: ignore[misc]
        if names == "none":

            def fit(self, *args: Any, **kwargs: Any) -> Any:
                return super().fit(*args, **kwargs)
        else:

            def fit(self, x: Any, y: Any = None, *args: Any, fast: bool = True, **kwargs: Any) -> Any:
                return super().fit(x, y, *args, **kwargs)

    model = Own([keras.Input([6]), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    x, y = _data(12)
    data = npu.distribute.divided(tf.data.Dataset.from_tensor_slices((x, y)).batch(4))
    model = npu.distribute.replicate(model)
    if names == "none":
        model.fit(x, y, 4, 2, 0, [Log("/nowhere/log.csv")], validation_data=data)
    else:
        model.fit(x, y, 4, epochs=2, verbose=0, callbacks=[Log("/nowhere/log.csv")], validation_data=data)
    return ran


def body_old_division() -> tuple[int, int]:
    """Return this rank's labelled and unlabelled samples of 5 and 10, divided as 0.1 did."""

    def step(self: Any, data: Any) -> Any:
        seen.append((data[0].shape[0], data[1].shape[0]))
        return {"loss": tf.reduce_sum(self(data[0]))}

    seen: list[Any] = []
    model = _model(step)
    model.compile("sgd")
    x, _ = samples(10)
    with settings(NPU_DEVICE_DIVISION="first"):
        npu.distribute.replicate(model).fit(tf.data.Dataset.from_tensors((x[:4], x)), verbose=0)
    return seen[-1]


def body_first_axes(kind: str) -> str:
    """Return the error of a batch whose tensors have no common length."""
    model = _model(lambda self, data: {"loss": tf.reduce_sum(data["nodes"])})
    model.compile("sgd")
    model = npu.distribute.replicate(model)
    graph = {"nodes": np.ones([7, 6], np.float32), "edges": np.zeros([12, 2], np.int32)}
    dataset: Any = tf.data.Dataset.from_tensors(graph)
    if kind == "divided":
        dataset = npu.distribute.divided(dataset)
    return error_of(model.fit, dataset, verbose=0)


def body_statement(kind: str) -> list[str]:
    """Return the lines of the statement about learning rates and normalisation."""
    keras = tf.keras
    normal = keras.layers.BatchNormalization
    model = _model(None, normal(name="one"), normal(synchronized=True), normal(name="still", trainable=False))
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)
    optimizers = keras.optimizers.legacy if kind == "legacy" else keras.optimizers
    model.compile(optimizers.SGD(schedule), "mse")
    npu.distribute.replicate(model)
    return start.statement(world(), model, 8, None, "checked")


@pytest.mark.parametrize(
    "kind", ["added alone", "activity", "not reduced", pytest.param("added", marks=pytest.mark.only_keras("3"))]
)
def test_losses_per_sample(several_keras_ranks: Pool, keras_single: Pool, kind: str) -> None:
    compare(several_keras_ranks, keras_single, body_losses, kind)


def test_tensors_of_different_lengths(several_keras_ranks: Pool, keras_single: Pool) -> None:
    compare(several_keras_ranks, keras_single, body_two_lengths)


@pytest.mark.parametrize(
    "kind",
    ["parts", "dictionary and object", "a closure", pytest.param("legacy", marks=pytest.mark.only_keras("2"))],
)
def test_optimizers_anywhere(several_keras_ranks: Pool, keras_single: Pool, kind: str) -> None:
    compare(several_keras_ranks, keras_single, body_optimizers, kind)


@pytest.mark.parametrize(
    "kind", ["synchronised", "variable", "static size", "of another model", "a part for testing only"]
)
def test_own_steps(several_keras_ranks: Pool, keras_single: Pool, kind: str) -> None:
    compare(several_keras_ranks, keras_single, body_step, kind)


def test_float64(several_keras_ranks: Pool, keras_single: Pool) -> None:
    compare(several_keras_ranks, keras_single, body_float64, tolerance=1e-13)


@pytest.mark.parametrize("names", ["none", "some"])
def test_a_class_with_a_fit_of_its_own(several_keras_ranks: Pool, names: str) -> None:
    first, *others = several_keras_ranks.run(body_own_fit, names)
    assert first == [True, True, True]
    assert others == [[]] * len(others)


def test_first_axes_that_are_not_samples(keras_two_ranks: Pool) -> None:
    for error in keras_two_ranks.run(body_first_axes, "whole"):
        assert "  data['edges']: shape (12, 2)\n" in error and "  data['nodes']: shape (7, 6)\n" in error
        assert "npu.distribute.divided(dataset)" in error
    assert keras_two_ranks.run(body_first_axes, "divided") == ["", ""]


def test_the_division_of_0_1(keras_two_ranks: Pool) -> None:
    assert keras_two_ranks.run(body_old_division) == [(2, 2), (2, 2)]


def test_the_statement(keras_two_ranks: Pool, keras: str) -> None:
    for kind in ("new", *(["legacy"] if keras == "2" else [])):
        lines = keras_two_ranks.run(body_statement, kind)[0]
        assert "  learning rate  ExponentialDecay (SGD), as given, not scaled by the number of ranks" in lines
        [about] = [line for line in lines if line.startswith("  batch norm ")]
        assert "1 layer (one)" in about and "synchronized=True" in about
