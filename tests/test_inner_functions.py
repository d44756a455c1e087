"""Functions of the script inside the step of a replicated model: TensorFlow keeps what it has traced of them, and each
step has traces of its own.
"""

from __future__ import annotations

import functools
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from caught_messages import error_of
from fit_models import descend, outcome, samples
from pool import Pool
from rank_comparison import compare

import npu_device as npu
from npu_device._src import compat


def one_layer() -> Any:
    """Return a class of models with a layer ``dense`` that is built."""

    class OneLayer(tf.keras.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.dense = tf.keras.layers.Dense(1)
            self.dense.build((None, 6))

    return OneLayer


def body_functions(kind: str) -> Any:
    """Functions of the script, in which TensorFlow keeps what it has traced: a step, what it calls, a model's call."""
    keras = tf.keras
    keras.utils.set_random_seed(3)
    parts = [keras.layers.Dense(4), keras.layers.BatchNormalization(synchronized=True)]
    parts.append(keras.layers.Dense(1))
    for size, part in zip((6, 4, 4), parts):
        part.build((None, size))

    class Model(keras.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.parts = parts
            self.update = tf.function(self.learn)
            self.total = keras.losses.MeanSquaredError(reduction="sum")

        def forward(self, x: Any, training: bool = False) -> Any:
            hidden = self.parts[0](x)
            if kind == "call":
                hidden = self.parts[1](hidden, training=training)
            return self.parts[2](hidden)

        @tf.function(jit_compile=True)  # type: ignore[untyped-decorator]
        def total_of(self, x: Any, y: Any) -> Any:
            return self.total(y, self(x, training=True))

        def learn(self, x: Any, y: Any) -> Any:
            def loss() -> Any:
                loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
                loss += 0.01 * self.total_of(x, y)
                for count in tf.range(2):  # only a function with AutoGraph can do this
                    loss += 0.1 * loss * tf.cast(count, loss.dtype)
                return loss

            return descend(self, loss)

    class OwnStep(Model):
        def train_step(self, data: Any) -> Any:
            return {"loss": self.update(*data)}

        @tf.function  # type: ignore[untyped-decorator]
        def test_step(self, data: Any) -> Any:
            return {"loss": tf.reduce_mean((self(data[0]) - data[1]) ** 2)}

    inside = tf.function(Model.forward)
    Model.call = inside if kind == "call" else Model.forward
    model = Model() if kind == "call" else OwnStep()
    x, y = samples(41)
    y = y[:, None].astype(np.float32)
    model(x)  # kept, too
    optimizer, histories = keras.optimizers.SGD(0.05), []
    for _ in range(2):
        model.compile(
            optimizer, "mse" if kind == "call" else None, run_eagerly=kind == "eager step"
        )
        model = npu.distribute.replicate(model)
        data = {"batch_size": 10, "shuffle": False, "verbose": 0}
        histories.append(model.fit(x, y, validation_data=(x[:33], y[:33]), **data))
    logs = [np.asarray(log) for history in histories for _, log in sorted(history.history.items())]
    return outcome(model, histories[0], logs=logs)


def body_compiled_by_xla() -> tuple[str, int]:
    """Return the error of a step whose function XLA is to compile, and how often a function of a call was traced."""
    keras, traces = tf.keras, []

    class Model(keras.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.dense = keras.layers.Dense(1)
            self.update = tf.function(self.learn, jit_compile=True)

        def call(self, x: Any) -> Any:
            return self.dense(x)

        def learn(self, x: Any) -> Any:
            return descend(self, lambda: tf.reduce_mean(self(x) ** 2))

        def train_step(self, data: Any) -> Any:
            return {"loss": self.update(data)}

    @tf.function  # type: ignore[untyped-decorator]
    def doubled(x: Any) -> Any:
        traces.append(x)
        return 2 * x

    x, y = samples(12)
    model = Model()
    model.dense.build((None, 6))
    model.compile(keras.optimizers.SGD(0.1))
    error = error_of(npu.distribute.replicate(model).fit, x, batch_size=6, verbose=0)
    layers = [keras.Input([6]), keras.layers.Lambda(doubled), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    model.compile(keras.optimizers.SGD(0.1), "mse")
    model = npu.distribute.replicate(model)
    model.fit(x, y, batch_size=6, verbose=0)
    traces.clear()
    model.fit(x, y, batch_size=6, epochs=2, verbose=0)
    return error, len(traces)


def body_logs() -> Any:
    """What steps that are functions return: a sum, with no metric; then results of metrics, made in the first step."""
    keras, late = tf.keras, []  # Keras doesn't list these metrics
    keras.utils.set_random_seed(3)

    class Model(keras.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.dense = keras.layers.Dense(2, activation="sigmoid")
            self.dense.build((None, 6))

        def call(self, x: Any) -> Any:
            return self.dense(x)

        @tf.function  # type: ignore[untyped-decorator]
        def train_step(self, data: Any) -> Any:
            return {"sum": descend(self, lambda: tf.reduce_sum((self(data[0]) - data[1]) ** 2))}

        @tf.function  # type: ignore[untyped-decorator]
        def test_step(self, data: Any) -> Any:
            for metric in late:
                metric.update_state(data[1], self(data[0]))
            return {"f": late[0].result(), "hits": late[1].result()}

    x, y = samples(41)
    y = np.stack([y > 0, y > 1], axis=1).astype(np.float32)
    model = Model()
    model.compile(keras.optimizers.SGD(0.01))
    model = npu.distribute.replicate(model)
    history = model.fit(x, y, batch_size=10, shuffle=False, verbose=0)
    late += [keras.metrics.F1Score(average="micro", threshold=0.5)]
    late += [keras.metrics.TruePositives()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NPU_DEVICE_FIRST_STEP_CHECK", "off")
        logs = model.evaluate(x[:33], y[:33], batch_size=10, return_dict=True, verbose=0)
    return {**outcome(model, history), "logs": logs}


def body_order() -> list[int]:
    """Return what two Python functions of a step note, of which the first one takes longer."""
    keras, notes = tf.keras, []

    def note(number: int, seconds: float) -> None:
        time.sleep(seconds)
        notes.append(number)

    class Model(keras.Model):  # type: ignore[misc]
        def train_step(self, data: Any) -> Any:
            for number, seconds in ((1, 0.2), (2, 0.0)):
                tf.numpy_function(functools.partial(note, number, seconds), [], [])
            return {"loss": tf.reduce_mean(data)}

    model = Model()
    model.compile()
    npu.distribute.replicate(model).fit(samples(12)[0], batch_size=12, verbose=0)
    return notes


def body_loop_in_a_call() -> Any:
    """Add up a loss, by a function of the script, in a call that needs AutoGraph, while a thread calls a function."""
    keras, traces, is_over = tf.keras, [], threading.Event()
    keras.utils.set_random_seed(3)

    class Model(one_layer()):  # type: ignore[misc]
        @tf.function  # type: ignore[untyped-decorator]
        def call(self, x: Any) -> Any:
            hidden = self.dense(x)
            for _ in tf.range(3):
                hidden = 0.9 * hidden
            return hidden

        def test_step(self, data: Any) -> Any:
            return {"sum": sum_of_squares(data[1], self(data[0]))}

    def sum_of_squares(y: Any, predicted: Any) -> Any:
        return tf.reduce_sum((tf.cast(y, predicted.dtype) - predicted) ** 2)

    @tf.function  # type: ignore[untyped-decorator]
    def doubled(x: Any) -> Any:
        traces.append(x)
        return 2 * x

    def call_until_it_is_over() -> None:
        while not is_over.wait(0.001):
            doubled(tf.ones([2]))

    x, y = samples(40)
    y = y[:, None].astype(np.float32)
    doubled(tf.ones([2]))
    model = Model()
    model(x)
    model.compile(keras.optimizers.SGD(0.001), sum_of_squares)
    model = npu.distribute.replicate(model)
    with ThreadPoolExecutor() as threads:
        calls = threads.submit(call_until_it_is_over)
        try:
            history = model.fit(x, y, batch_size=10, shuffle=False, verbose=0)
            logs = model.evaluate(x, y, batch_size=10, verbose=0, return_dict=True)
        finally:
            is_over.set()
        calls.result()
    assert len(traces) == 1
    return outcome(model, history, logs=[np.asarray(log) for log in logs.values()])


def body_tapes(kind: str) -> Any:
    """A loop under a tape that may be asked twice: TensorFlow puts it into a function that it keeps nowhere."""
    keras = tf.keras
    keras.utils.set_random_seed(3)

    class Model(one_layer()):  # type: ignore[misc]
        def call(self, x: Any) -> Any:
            return tf.while_loop(
                lambda step, _: step < 3,
                lambda step, hidden: (step + 1, tf.tanh(1.1 * hidden)),
                (tf.constant(0), self.dense(x)),
            )[1]

        def train_step(self, data: Any) -> Any:
            x, y = data
            with tf.GradientTape(persistent=kind == "persistent") as outer:
                with tf.GradientTape() as inner:
                    inner.watch(x)
                    predicted = self(x)
                loss = tf.reduce_mean((predicted - y) ** 2)
                if kind == "nested":
                    loss += tf.reduce_mean(inner.gradient(predicted, x) ** 2)
            variables = self.trainable_variables
            self.optimizer.apply_gradients(zip(outer.gradient(loss, variables), variables))
            return {"loss": loss}

    x, y = samples(40)
    model = Model()
    model.compile(keras.optimizers.SGD(0.05))
    model = npu.distribute.replicate(model)
    y = y[:, None].astype(np.float32)
    return outcome(model, model.fit(x, y, batch_size=10, shuffle=False, verbose=0))


@pytest.mark.once
@pytest.mark.parametrize("kind", ["persistent", "nested"])
def test_loops_under_tapes_of_a_step(keras_two_ranks: Pool, keras_single: Pool, kind: str) -> None:
    compare(keras_two_ranks, keras_single, body_tapes, kind)


@pytest.mark.parametrize(
    "kind", ["step", "call", pytest.param("eager step", marks=pytest.mark.full)]
)
def test_functions_in_a_step_train_like_one_process(
    several_keras_ranks: Pool, keras_single: Pool, kind: str
) -> None:
    compare(several_keras_ranks, keras_single, body_functions, kind)


@pytest.mark.once
def test_a_step_with_a_loop_is_checked_and_leaves_functions_of_threads_alone(
    keras_two_ranks: Pool, keras_single: Pool
) -> None:
    compare(keras_two_ranks, keras_single, body_loop_in_a_call)


@pytest.mark.once
def test_functions_return_the_numbers_of_all_samples(
    keras_two_ranks: Pool, keras_single: Pool
) -> None:
    compare(keras_two_ranks, keras_single, body_logs)


@pytest.mark.once
def test_what_xla_compiles_is_refused_and_nothing_is_traced_again(keras_two_ranks: Pool) -> None:
    for error, traces in keras_two_ranks.run(body_compiled_by_xla):
        assert "leave jit_compile out of tf.function" in error
        assert traces == 0


@pytest.mark.once
def test_python_functions_run_in_their_order(keras_two_ranks: Pool) -> None:
    assert keras_two_ranks.run(body_order) == [[1, 2], [1, 2]]


def test_blocks_of_two_threads_leave_the_setting_of_the_script() -> None:
    first = compat.functions_inline()
    second = compat.functions_inline()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert tf.config.functions_run_eagerly()
    second.__exit__(None, None, None)
    assert not tf.config.functions_run_eagerly()
