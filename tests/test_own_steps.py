"""Replicated models whose steps hide something: losses per sample, tensors of other lengths, optimizers and variables
that Keras doesn't know, sizes that they rely on, a class's own ``fit``. The results are those of one process, or a
message says what can't be divided.
"""

from __future__ import annotations

import contextlib
import io
import re
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from caught_messages import error_of, settings, warnings_of_package
from fit_models import descend, outcome, samples
from pool import Pool
from rank_comparison import compare, same

import npu_device as npu
from npu_device._src.training.fit import start
from npu_device._src.training.opening.current_world import current_world


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

    keras.utils.set_random_seed(
        7
    )  # layers draw the seeds of their initial values when they are made
    regularized = keras.layers.Dense(3, activity_regularizer=keras.regularizers.L2(0.01))
    more, loss = {
        "added alone": ([PerSample()], None),
        "added, activity": ([PerSample(), regularized], "mse"),
        "activity": ([regularized], "mse"),
        "not reduced": ([], keras.losses.MeanSquaredError(reduction="none")),
    }[kind]
    model = _model(None, *more)
    model.compile(keras.optimizers.SGD(0.01), loss)
    model = npu.distribute.replicate(model)
    x, y = _data()
    history = model.fit(x, y, batch_size=10, epochs=2, shuffle=False, verbose=0)
    return outcome(model, history, scores=model.evaluate(x, y, batch_size=10, verbose=0))


def body_two_lengths(kind: str) -> Any:
    """40 unlabelled and 10 labelled samples a batch; then 8 and 2, so that some ranks have none; then 8 and 5."""

    def step(self: Any, data: Any) -> Any:
        free, (x, y) = data

        def loss() -> Any:
            return tf.reduce_mean((self(x, training=True) - y) ** 2) + 0.1 * tf.reduce_mean(
                self(free) ** 2
            )

        return {"out": descend(self, loss)}

    (free, _), (x, y) = _data(56), _data(17)

    batches = list(zip(np.split(free, [40, 48]), zip(np.split(x, [10, 12]), np.split(y, [10, 12]))))
    number = tf.TensorSpec([None, 6], tf.float32)
    spec = (number, (number, tf.TensorSpec([None, 1], tf.float32)))
    model = _model(step)
    model.compile(tf.keras.optimizers.SGD(0.1))
    dataset = tf.data.Dataset.from_generator(lambda: batches, output_signature=spec)
    return outcome(model, npu.distribute.replicate(model).fit(dataset, epochs=2, verbose=0))


def body_optimizers(kind: str) -> Any:
    """Optimizers that aren't attributes of the model: of a part, in a dictionary and an object, and in a closure."""
    keras = tf.keras
    kinds = keras.optimizers.legacy if kind == "legacy" else keras.optimizers
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)
    first, second, third = kinds.SGD(schedule), kinds.Adam(0.01), kinds.SGD(0.05)
    keras.utils.set_random_seed(3 + npu.distribute.rank())

    class Parts(keras.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.middle, self.decoder = (
                keras.Sequential([keras.Input([size]), keras.layers.Dense(units, "tanh")])
                for size, units in ((6, 4), (4, 4), (4, 6))
            )
            self.encoder.compile(optimizer=first)
            self.optimizers = {"of": {"the": [types.SimpleNamespace(held=(second,))]}}

        def train_step(self, data: Any) -> Any:
            x = data[0] if isinstance(data, tuple) else data
            with tf.GradientTape(persistent=True) as tape:
                loss = tf.reduce_mean((self.decoder(self.middle(self.encoder(x))) - x) ** 2)
            used = self.encoder.optimizer, self.optimizers["of"]["the"][0].held[0], third
            for part, optimizer in zip((self.encoder, self.middle, self.decoder), used):
                variables = part.trainable_variables
                optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
            return {"out": loss}

    model = Parts()
    model.compile()
    model = npu.distribute.replicate(model)
    x, _ = samples(41)
    return outcome(model, model.fit(x, batch_size=10, epochs=2, shuffle=False, verbose=0))


def body_step(kind: str) -> Any:
    """Trainings with a step of the script's own."""
    keras = tf.keras
    x, y = _data()
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(10)
    moved, tests = tf.Variable(0.0, trainable=False), None
    if kind == "a variable, and a part for testing only":

        def step(self: Any, data: Any) -> Any:
            x, y = data
            moved.assign(0.5 * moved + tf.reduce_mean(x[:, 0]))
            last = self.get_layer("last")  # tf-keras can't list all variables
            loss = descend(
                last, lambda: tf.reduce_mean((self(x, training=True) - y) ** 2), self.optimizer
            )
            return {"loss": loss}

        def test_step(self: Any, data: Any) -> Any:
            return {"loss": tf.reduce_mean((self(self.before(data[0])) - data[1]) ** 2)}

        model, tests = _model(step), data
        model.before = keras.Sequential(
            [keras.layers.Dropout(0.1), keras.layers.BatchNormalization()]
        )
        type(model).test_step = test_step
    else:
        assert kind == "synchronised, of another model"  # whose step is part of this one's
        inner = _model(_mean_step, keras.layers.BatchNormalization(synchronized=True, momentum=0.8))
        inner = npu.distribute.replicate(inner)
        inner.compile(keras.optimizers.SGD(0.1))
        outer = type(
            "Outer", (keras.Model,), {"train_step": lambda self, data: inner.train_step(data)}
        )
        model = outer(inner.inputs, inner.outputs)
    model.compile(keras.optimizers.SGD(0.1))
    model = npu.distribute.replicate(model)
    return outcome(model, model.fit(data, epochs=2, verbose=0, validation_data=tests), moved=moved)


def body_parts_of_a_batch(kind: str) -> Any:
    """Losses of a fixed length for the whole batch, and eager steps whose numbers aren't means."""
    keras = tf.keras

    class Experts(keras.layers.Layer):  # type: ignore[misc]
        def call(self, values: Any) -> Any:
            shares = tf.nn.softmax(values)
            self.add_loss(0.1 * tf.reduce_mean(shares**2, axis=0))
            self.add_loss(0.1 * tf.reduce_mean(shares**3, axis=0, keepdims=True))
            return values

    def test_step(self: Any, data: Any) -> Any:
        guess = tf.cast(self(data[0]) > 0, tf.float32)
        self.score.update_state(tf.cast(data[1] > 0, tf.float32), guess)
        score = self.score.result()
        return {"score": score, "twice": 2 * score}

    x, y = _data()
    if kind == "experts":
        model = _model(None, Experts())
        model.compile(keras.optimizers.SGD(0.1), "mse")
    else:
        model = _model()
        if kind == "eager, metric built in a step":
            model.score = keras.metrics.F1Score(name="score")
            model.test_step = types.MethodType(test_step, model)
        model.compile(
            keras.optimizers.SGD(0.001),
            lambda y, out: tf.reduce_sum((y - out) ** 2),
            run_eagerly=True,
        )
    model = npu.distribute.replicate(model)
    scores = model.evaluate(x, y, batch_size=10, verbose=0, return_dict=True)
    history = {}
    # 4 samples for each of two ranks are as many as there are experts.
    for rows, size in ((41, 10), (40, 8)):
        data = tf.data.Dataset.from_tensor_slices((x[:rows], y[:rows]))
        batches = data.batch(size, drop_remainder=rows == 40)
        fitted = model.fit(batches, validation_data=batches, verbose=0)
        history[rows] = {name: np.asarray(log) for name, log in fitted.history.items()}
    return outcome(model, fitted, logs=history, scores=scores)


def body_sums(kind: str) -> Any:
    """Losses that are sums over the samples, with a last batch of a single one."""
    keras, squared = tf.keras, tf.keras.losses.get("mse")

    class Adds(keras.layers.Layer):  # type: ignore[misc]
        def call(self, values: Any) -> Any:
            self.add_loss(0.1 * tf.reduce_sum(values))
            return values

    def step(self: Any, data: Any) -> Any:
        x, y = data
        loss = descend(self, lambda: squared(y, self(x, training=True)))
        self.seen.update_state(tf.reduce_sum(loss))
        if kind == "two optimizers":
            last = self.get_layer("last")
            descend(last, lambda: tf.reduce_mean(squared(y, self(x, training=True))), self.second)
        return {"sum": tf.reduce_sum(loss), "count": tf.shape(x)[0], "seen": self.seen.result()}

    def test_step(self: Any, data: Any) -> Any:
        return {"sum": tf.reduce_sum(squared(data[1], self(data[0])))}

    def added_up(y: Any, out: Any) -> Any:
        return tf.reduce_sum((y - out) ** 2)

    if kind == "compiled, with a penalty":
        keras.utils.set_random_seed(7)
        model = _model(
            None, Adds(), keras.layers.Dense(3, kernel_regularizer=keras.regularizers.L2(0.1))
        )
        model.compile(keras.optimizers.SGD(0.001), added_up, metrics=["mae"], steps_per_execution=2)
    else:
        model = _model(step)
        type(model).test_step = test_step
        model.second, model.seen = keras.optimizers.SGD(0.01), keras.metrics.Mean()
        model.compile(keras.optimizers.SGD(0.001, global_clipnorm=3.0))
    x, y = _data()
    model = npu.distribute.replicate(model)
    history = model.fit(x, y, batch_size=10, epochs=2, shuffle=False, verbose=0)
    return outcome(
        model, history, scores=model.evaluate(x, y, batch_size=10, verbose=0, return_dict=True)
    )


def body_numbers(kind: str) -> Any:
    """Metrics that are given numbers, sums and means over the samples, and what is made of their results."""
    metrics = tf.keras.metrics

    class Own(metrics.Metric):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(name="own")
            self.total = self.add_weight(name="total", shape=(), initializer="zeros")

        def update_state(self, hits: Any, loss: Any) -> None:
            self.total.assign_add(tf.cast(hits, tf.float32) + 100 * loss)

        def result(self) -> Any:
            return tf.convert_to_tensor(self.total)

    def look(self: Any, x: Any, y: Any) -> Any:
        hits, loss = (
            tf.reduce_sum(tf.cast(x[:, :1] * y > 0, tf.float32)),
            tf.reduce_mean((self(x) - y) ** 2),
        )
        samples = tf.cast(tf.shape(x)[0], tf.float32)
        given = {
            "hits": (hits,),
            "samples": (samples,),
            "steps": (1,),
            "losses": (loss,),
            "vector": (y,),
        }
        given |= {"rate": (hits / samples, samples), "mean": (hits,), "own": (hits, loss)}
        for name, values in given.items():
            self.looks[name].update_state(*values)
        found = {name: metric.result() for name, metric in self.looks.items()}
        return {
            **found,
            "quotient": found["hits"] / found["samples"],
            "root": tf.sqrt(found["losses"]),
        }

    def step(self: Any, data: Any) -> Any:
        descend(self, lambda: tf.reduce_mean((self(data[0], training=True) - data[1]) ** 2))
        return look(self, *data)

    model = _model(step)
    type(model).test_step = lambda self, data: look(self, *data)
    model.looks = {
        name: metrics.Sum(name=name) for name in ("hits", "samples", "steps", "losses", "vector")
    }
    model.looks |= {"rate": metrics.Mean(), "mean": metrics.Mean(), "own": Own()}
    model.compile(tf.keras.optimizers.SGD(0.01))
    x, y = _data()
    model = npu.distribute.replicate(model)
    history = model.fit(x, y, batch_size=10, epochs=2, shuffle=False, verbose=0)
    return outcome(
        model, history, scores=model.evaluate(x, y, batch_size=10, verbose=0, return_dict=True)
    )


def body_numbers_of_no_kind(is_remedied: bool) -> Any:
    """Return what a step logs beside its loss, a perplexity and a norm of gradients, and the warnings."""

    def of_all_ranks(number: Any) -> Any:
        if is_remedied:
            return npu.distribute.all_reduce(number)
        return number

    def step(self: Any, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
        gradients = of_all_ranks(tape.gradient(loss, self.trainable_variables))
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
        self.perplexity.update_state(tf.exp(of_all_ranks(loss)))
        self.losses_seen.update_state(loss)
        return {
            "perplexity": self.perplexity.result(),
            "loss": loss,
            "norm": tf.linalg.global_norm(gradients),
            "twice": 2 * self.losses_seen.result(),
        }

    model = _model(step)
    model.perplexity = tf.keras.metrics.Mean("perplexity")
    model.losses_seen = tf.keras.metrics.Mean("losses_seen")
    model.compile(tf.keras.optimizers.SGD(0.01))
    x, y = _data()
    model = npu.distribute.replicate(model)
    with warnings_of_package() as warnings:
        history = model.fit(x, y, batch_size=10, epochs=2, shuffle=False, verbose=0)
    return outcome(model, history), [warning for warning in warnings if "neither" in warning]


def body_logs(eager: bool) -> tuple[dict, dict, list[str]]:
    """Return logs of all kinds, of ``fit`` and ``evaluate``, and the warnings."""

    class Total(tf.keras.metrics.Metric):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__(name="total")
            self.total = self.add_weight(name="total", shape=(), initializer="zeros")

        def update_state(self, values: Any) -> None:
            self.total.assign_add(tf.reduce_sum(values))

        def result(self) -> Any:
            return self.total

    def logs_of(self: Any, x: Any, y: Any) -> Any:
        loss = tf.reduce_mean((self(x) - y) ** 2)
        self.seen.update_state(x)
        return {
            "vector": tf.reduce_mean(x, axis=0),
            "any": tf.reduce_any(x > 0.99),
            "all": tf.reduce_all(tf.identity(x) < 0.99),
            "largest": tf.cast(tf.reduce_max(x) * 1000, tf.int32),
            "complex": tf.reduce_mean(tf.complex(x, 2 * x)),
            "rate": self.optimizer.learning_rate,
            "steps": self.optimizer.iterations,
            "total": self.seen.result(),
            "samples": x[:, 0],
            "small": loss < 1e-3,
            "small for all": npu.distribute.all_reduce(loss) < 1e-3,
        }

    def step(self: Any, data: Any) -> Any:
        descend(self, lambda: tf.reduce_mean((self(data[0], training=True) - data[1]) ** 2))
        return logs_of(self, *data)

    model = _model(step)
    type(model).test_step = lambda self, data: logs_of(self, *data)
    model.seen = Total()
    model.compile(tf.keras.optimizers.SGD(0.01), run_eagerly=eager)
    model = npu.distribute.replicate(model)
    x = np.random.default_rng(0).uniform(size=[9, 6]).astype(np.float32)
    x[8, 5] = 0.999
    y = x[:, :1]
    with warnings_of_package() as warnings:
        history = model.fit(x, y, batch_size=9, epochs=2, shuffle=False, verbose=0).history
        found = model.evaluate(x, y, batch_size=9, verbose=0, return_dict=True)
    return history, found, [warning for warning in warnings if warning.startswith("the log")]


@pytest.mark.parametrize("eager", [False, True])
def test_logs_of_all_kinds(several_keras_ranks: Pool, keras_single: Pool, eager: bool) -> None:
    [(alone, alone_tested, _)] = keras_single.run(body_logs, eager)
    ranks = several_keras_ranks.run(body_logs, eager)
    equal = ["any", "complex", "rate", "total", "small for all"]
    if not eager:
        # The history of an eager fit of tf-keras holds the variable itself, one for all epochs.
        equal += ["all", "vector", "steps"]
    for history, tested, _ in ranks:
        for name in equal:
            np.testing.assert_allclose(history[name], alone[name], rtol=1e-6, err_msg=name)
            np.testing.assert_allclose(tested[name], alone_tested[name], rtol=1e-6, err_msg=name)
        # Whatever else is a number is the same for all.
        for name in ("all", "largest", "small"):
            np.testing.assert_equal(history[name], ranks[0][0][name], err_msg=name)
    named = [re.findall("the log '(.+?)'", warning)[0] for warning in ranks[0][2]]
    # Of eager truth values it isn't known what they are made of, but whether they differ.
    expected = ["all", "any", "samples", "vector"] if eager else ["samples", "small"]
    assert sorted(set(named)) == expected and not any(warnings for _, _, warnings in ranks[1:])


FOUND_BY_NAME: dict[str, Any] = {}
"""A metric that a step finds as a global of its module."""


def body_unlisted_metrics(kind: str) -> Any:
    """Metrics that steps update, but that ``model.metrics`` doesn't list; and some that steps leave alone."""
    keras, metrics = tf.keras, tf.keras.metrics
    rank = npu.distribute.rank()

    class Largest(metrics.Metric):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(name="largest")
            self.value = self.add_weight(name="value", shape=(), initializer="zeros")
            self.inner = metrics.Sum()

        def update_state(self, values: Any) -> None:
            self.inner.update_state(values)
            self.value.assign(tf.maximum(tf.convert_to_tensor(self.value), tf.reduce_max(values)))

        def result(self) -> Any:
            return tf.convert_to_tensor(self.value) + self.inner.result()

    def look(self: Any, x: Any, y: Any) -> Any:
        out = self.part(x)
        loss = tf.reduce_mean((out - y) ** 2)
        updates: dict[str, Any] = {
            "listed": (self.listed, (loss,)),
            "attribute": (self.kept, (tf.cast(y > 1, tf.int32), tf.sigmoid(out))),
            "held": (self.held["in"][0].held, (loss,)),
            "global": (FOUND_BY_NAME["metric"], (y, out)),
            "closure": (enclosed, (x[:, 0],)),
            "of the part": (self.part.seen, (x,)),
            "of the script": (largest, (out,)),
        }
        for metric, given in updates.values():
            metric.update_state(*given)
        if kind == "keras3":
            compiled = self.part.compute_metrics(x, y, out)
        else:
            self.part.compiled_metrics.update_state(y, out)
            compiled = {"mae": self.part.compiled_metrics.metrics[0].result()}
        return {**compiled, **{name: metric.result() for name, (metric, _) in updates.items()}}

    def step(self: Any, data: Any) -> Any:
        descend(
            self.part, lambda: tf.reduce_mean((self.part(data[0]) - data[1]) ** 2), self.optimizer
        )
        return look(self, *data)

    class Whole(keras.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.part = _model()
            self.part.compile("sgd", "mse", metrics=["mae"])
            self.part.seen = metrics.Mean()
            self.listed, self.kept = metrics.Mean(), metrics.AUC(50)
            self.held = {"in": [types.SimpleNamespace(held=metrics.Mean(), alone=alone)]}

        @property
        def metrics(self) -> list:
            return [self.listed]

        train_step = step

        def test_step(self, data: Any) -> Any:
            return look(self, *data)

    alone, enclosed, largest = metrics.Mean(), metrics.Sum(), Largest()
    FOUND_BY_NAME["metric"] = metrics.MeanSquaredError()
    model = Whole()
    model.compile(keras.optimizers.SGD(0.01))
    model = npu.distribute.replicate(model)
    # Each rank's own number, which no step is to add up.
    update = keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: alone.update_state(rank + 1.0))
    x, y = _data()
    given: dict[str, Any] = {"batch_size": 10, "verbose": 0}
    history = model.fit(x, y, epochs=2, shuffle=False, callbacks=[update], **given)
    scores = model.evaluate(x, y, return_dict=True, **given)
    assert [float(variable.numpy()) for variable in alone.variables] == [2 * rank + 2.0, 2.0]
    results = [
        metric.result() for metric in (model.kept, enclosed, largest, FOUND_BY_NAME["metric"])
    ]
    return outcome(model, history, scores=scores, results=results)


def body_stateful(kind: str) -> Any:
    """A recurrent layer that keeps a state for each sample: the ranks' batches are parts of those of one process."""
    keras, rank, size = tf.keras, npu.distribute.rank(), npu.distribute.size()
    keras.utils.set_random_seed(3)
    x, _ = samples(24)
    model = keras.Sequential(
        [
            keras.Input(batch_shape=[6 // size, 2, 3])
            if kind == "keras3"
            else keras.Input([2, 3], 6 // size),
            keras.layers.GRU(2, stateful=True),
            keras.layers.Dense(1),
        ]
    )
    model.compile(keras.optimizers.SGD(0.1), "mse")
    mine = x.reshape(4, size, 6 // size, 2, 3)[:, rank].reshape(-1, 2, 3)
    data = tf.data.Dataset.from_tensor_slices((mine, mine[:, 0, :1])).batch(
        6 // size, drop_remainder=True
    )
    history = npu.distribute.replicate(model).fit(
        npu.distribute.divided(data), epochs=2, verbose=0, shuffle=False
    )
    weights = [variable.numpy() for variable in model.trainable_variables]
    return {"weights": weights, "history": np.asarray(history.history["loss"])}


def body_float64() -> Any:
    """A model and data of float64, with weights that no binary number is equal to."""
    keras = tf.keras
    before = keras.backend.floatx()
    keras.backend.set_floatx("float64")
    keras.mixed_precision.set_global_policy("float64")
    try:
        model = _model()
        model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"])
        x, y = (each.astype(np.float64) for each in _data(47))
        model = npu.distribute.replicate(model)
        return outcome(model, model.fit(x, y, batch_size=12, epochs=3, shuffle=False, verbose=0))
    finally:
        keras.backend.set_floatx(before)
        keras.mixed_precision.set_global_policy(before)


def body_own_fit(directory: str) -> list[str]:
    """Return what this rank has logged of models whose class has a ``fit`` that passes all on, or all but what it
    names.
    """
    keras, mine = tf.keras, Path(directory, str(npu.distribute.rank()))
    mine.mkdir()

    class All(keras.Sequential):  # type: ignore[misc]
        def fit(self, *args: Any, **kwargs: Any) -> Any:
            return super().fit(*args, **kwargs)

    class Some(keras.Sequential):  # type: ignore[misc]
        def fit(self, x: Any, y: Any = None, *args: Any, fast: bool = True, **kwargs: Any) -> Any:
            return super().fit(x, y, *args, **kwargs)

    x, y = _data(12)
    data = npu.distribute.divided(tf.data.Dataset.from_tensor_slices((x, y)).batch(4))
    for kind in (All, Some):
        model = kind([keras.Input([6]), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        fit, log = (
            npu.distribute.replicate(model).fit,
            [keras.callbacks.CSVLogger(f"{mine}/{kind.__name__}")],
        )
        if kind is All:
            fit(x, y, 4, 2, 0, log, validation_data=data)
        else:
            fit(x, y, 4, epochs=2, verbose=0, callbacks=log, validation_data=data)
    return [path.read_text() for path in mine.iterdir()]


def body_old_division() -> tuple[int, int]:
    """Return this rank's labelled and unlabelled samples of 5 and 10, divided as 0.1 did."""

    def step(self: Any, data: Any) -> Any:
        seen.append((data[0].shape[0], data[1].shape[0]))
        return {"loss": tf.reduce_sum(self(data[0]))}

    seen: list[Any] = []
    model, (x, _) = _model(step), samples(10)
    model.compile("sgd")
    with settings(NPU_DEVICE_DIVISION="first"):
        npu.distribute.replicate(model).fit(tf.data.Dataset.from_tensors((x[:4], x)), verbose=0)
    return seen[-1]


def body_first_axes() -> list[str]:
    """Return the errors of a batch whose tensors have no common length: as it is, and divided."""
    graph = {"nodes": np.ones([7, 6], np.float32), "edges": np.zeros([12, 2], np.int32)}
    dataset = tf.data.Dataset.from_tensors(graph)
    model = _model(lambda self, data: {"loss": tf.reduce_sum(data["nodes"])})
    model.compile("sgd")
    model = npu.distribute.replicate(model)
    return [
        error_of(model.fit, each, verbose=0) for each in (dataset, npu.distribute.divided(dataset))
    ]


def body_statement(kind: str) -> list[str]:
    """Return the lines of the statement about learning rates and normalisation."""
    keras = tf.keras
    normal = keras.layers.BatchNormalization
    model = _model(
        None, normal(name="one"), normal(synchronized=True), normal(name="still", trainable=False)
    )
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)
    optimizers = keras.optimizers.legacy if kind == "legacy" else keras.optimizers
    model.compile(optimizers.SGD(schedule), "mse")
    npu.distribute.replicate(model)
    return start.statement(current_world(), model, [model.optimizer], 8, 1, "checked")


def body_rates(kind: str) -> list[str]:
    """Return the lines of the statement of a ``fit`` about learning rates; ``kind`` says whose the step is."""
    keras = tf.keras

    def step(self: Any, data: Any) -> Any:
        x, y = data
        logs = {}
        for name, optimizer in (("first", self.first), ("last", self.second)):
            layer = self.get_layer(name)
            logs[name] = descend(layer, lambda: tf.reduce_mean((self(x) - y) ** 2), optimizer)
        return logs

    used_before = keras.Sequential([keras.Input([4]), keras.layers.Dense(4)], name="first")
    used_before.compile(keras.optimizers.Adagrad(0.5), "mse")
    npu.distribute.replicate(used_before).fit(np.ones([8, 4]), np.ones([8, 4]), verbose=0)
    if kind == "script":
        model = _model(step, used_before)
        model.compile()  # with an optimizer that never steps
        model.first, model.second = keras.optimizers.SGD(0.25), keras.optimizers.Adam(0.125)
    else:
        model = _model(None, used_before)
        model.compile(keras.optimizers.SGD(0.25), "mse")
    x, y = _data(8)
    errors = io.StringIO()
    with settings({"NPU_DEVICE_STATEMENT": "on"}), contextlib.redirect_stderr(errors):
        npu.distribute.replicate(model).fit(x, y, verbose=0)
    lines = errors.getvalue().splitlines()
    return [line for line in lines if line.startswith("  learning rate ")]


KERAS_2, KERAS_3 = pytest.mark.only_keras("2"), pytest.mark.only_keras("3")


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        pytest.param(body_losses, "added alone", marks=pytest.mark.full),
        (body_losses, "not reduced"),
        pytest.param(body_losses, "activity", marks=KERAS_2),
        pytest.param(body_losses, "added, activity", marks=KERAS_3),
        pytest.param(body_two_lengths, "tensors", marks=pytest.mark.full),
        (body_optimizers, "optimizers"),
        pytest.param(body_optimizers, "legacy", marks=KERAS_2),
        pytest.param(body_parts_of_a_batch, "experts", marks=KERAS_3),
        pytest.param(body_parts_of_a_batch, "eager, a sum", marks=pytest.mark.full),
        pytest.param(body_parts_of_a_batch, "eager, metric built in a step", marks=KERAS_3),
        (body_sums, "values per sample"),
        pytest.param(body_sums, "two optimizers", marks=pytest.mark.full),
        pytest.param(body_sums, "compiled, with a penalty", marks=pytest.mark.full),
        pytest.param(body_numbers, "numbers", marks=pytest.mark.full),
        pytest.param(body_unlisted_metrics, "keras2", marks=KERAS_2),
        pytest.param(body_unlisted_metrics, "keras3", marks=KERAS_3),
        pytest.param(body_stateful, "keras2", marks=[KERAS_2, pytest.mark.full]),
        pytest.param(body_stateful, "keras3", marks=KERAS_3),
        (body_step, "a variable, and a part for testing only"),
        pytest.param(body_step, "synchronised, of another model", marks=pytest.mark.full),
    ],
)
def test_steps_of_the_script_train_like_one_process(
    several_keras_ranks: Pool, keras_single: Pool, body: Any, kind: str
) -> None:
    compare(several_keras_ranks, keras_single, body, kind)


@pytest.mark.once
def test_numbers_that_are_neither_means_nor_sums_are_named(
    keras_two_ranks: Pool, keras_single: Pool
) -> None:
    [(alone, _)] = keras_single.run(body_numbers_of_no_kind, False)
    (_, [warning]), (_, silent) = keras_two_ranks.run(body_numbers_of_no_kind, False)
    assert "for the metric 'perplexity', the log 'norm'. The 2 ranks average it" in warning
    assert silent == []
    for found, warnings in keras_two_ranks.run(body_numbers_of_no_kind, True):
        same(found, alone)
        assert warnings == []


def test_a_step_in_float64_keeps_its_digits(several_keras_ranks: Pool, keras_single: Pool) -> None:
    compare(several_keras_ranks, keras_single, body_float64, tolerance=1e-13)


@pytest.mark.once
def test_a_class_with_a_fit_of_its_own(keras_two_ranks: Pool, tmp_path: Path) -> None:
    first, second = keras_two_ranks.run(body_own_fit, str(tmp_path))
    assert [(text.count("\n"), "val_loss" in text) for text in first] == [
        (3, True)
    ] * 2 and second == []


@pytest.mark.once
def test_first_axes_that_are_not_samples(keras_two_ranks: Pool) -> None:
    for error, divided in keras_two_ranks.run(body_first_axes):
        assert (
            "  data['edges']: shape (12, 2)\n" in error
            and "  data['nodes']: shape (7, 6)\n" in error
        )
        assert "npu.distribute.divided(dataset)" in error
        assert divided == ""


@pytest.mark.once
def test_the_division_of_0_1(keras_two_ranks: Pool) -> None:
    assert keras_two_ranks.run(body_old_division) == [(2, 2), (2, 2)]


def test_the_statement_tells_batch_and_learning_rate(keras_two_ranks: Pool, keras: str) -> None:
    for kind in ("new", *(["legacy"] if keras == "2" else [])):
        lines = keras_two_ranks.run(body_statement, kind)[0]
        assert "  global batch   8 samples, 4 per rank; 1 steps per epoch" in lines
        assert (
            "  learning rate  ExponentialDecay (SGD), as given, not scaled by the number of ranks"
            in lines
        )
        [about] = [line for line in lines if line.startswith("  batch norm ")]
        assert "1 layer (one)" in about and "synchronized=True" in about


@pytest.mark.parametrize(
    ("kind", "rates"), [("script", "0.25 (SGD), 0.125 (Adam)"), ("Keras", "0.25 (SGD)")]
)
def test_the_statement_lists_optimizers_that_step(
    keras_two_ranks: Pool, kind: str, rates: str
) -> None:
    expected = f"  learning rate  {rates}, as given, not scaled by the number of ranks"
    assert keras_two_ranks.run(body_rates, kind) == [[expected], []]
