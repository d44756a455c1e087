"""Models for the tests of the first-step check, one of each kind: those that can be divided, and those that can't."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf
from fit_models import samples

import npu_device as npu

SAMPLES = 12


def model_and_data(kind: str) -> tuple[Any, dict[str, Any]]:
    """Return a compiled model and the arguments of ``fit``, for one batch."""
    keras = tf.keras
    layers = keras.layers
    keras.utils.set_random_seed(3)
    x, y = samples(SAMPLES)
    data: dict[str, Any] = {"x": x, "y": y, "batch_size": SAMPLES, "verbose": 0, "shuffle": False}
    names = {
        "functional": _functional,
        "mixing operation": _functional,
        "mean": _functional,
        "sum": _functional,
        "valid steps": _functional,
        "added sum": _functional,
        "noise": _functional,
        "size in a layer": _functional,
    }
    if kind in names:
        return names[kind](kind, data)
    if kind == "own function":
        return _with_function(data)
    if kind == "ragged":
        lengths = [1, 6, 1, 6, 1, 6, 5, 3]
        steps, _ = samples(sum(lengths))
        values = [tf.RaggedTensor.from_row_lengths(each, lengths) for each in (steps, steps[:, :1])]
        inputs = keras.Input([None, 6], ragged=True)
        model = keras.Model(inputs, layers.TimeDistributed(layers.Dense(1))(inputs))
        model.compile(keras.optimizers.SGD(0.1), "mse")
        return model, {**data, "x": values[0], "y": values[1]}

    class Model(keras.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.dense = layers.Dense(3)
            self.noise = [layers.Dropout(0.5), layers.GaussianNoise(1.0), layers.BatchNormalization()]
            self.bank = self.add_weight(name="bank", shape=(8, 3), initializer="zeros", trainable=False)
            self.seen = self.add_weight(name="seen", shape=(), initializer="zeros", trainable=False)

        def call(self, x: Any) -> Any:
            return self.dense(x)

        def train_step(self, data: Any) -> Any:
            x, y = data if isinstance(data, tuple) else (data, None)
            if kind == "own noise":
                x += tf.random.normal(tf.shape(x)) * tf.random.uniform([tf.shape(x)[0], 1])
                for layer in self.noise:
                    x = layer(x, training=True)
            elif kind == "shuffles":
                x = tf.random.shuffle(x)
            elif kind == "python":
                x = tf.ensure_shape(tf.numpy_function(lambda array: array, [x], tf.float32), [None, 6])
            elif kind == "draws in a branch":
                x = tf.cond(tf.reduce_mean(x) > -9.0, lambda: x + tf.random.normal(tf.shape(x)), lambda: x)
            elif kind.startswith("fixed size"):
                x += tf.zeros([x.shape[0], 6])
            with tf.GradientTape() as tape:
                if kind.startswith("pairs"):
                    loss = tf.reduce_mean((self(x[0]) - self(x[1])) ** 2)
                elif kind in ("contrastive", "gathered"):
                    out = self(x)
                    others = npu.distribute.all_gather(out) if kind == "gathered" else out
                    distances = tf.reduce_sum((out[:, None] - others[None]) ** 2, axis=-1)  # samples meet here
                    loss = tf.reduce_mean(tf.sqrt(distances + 0.1))
                else:
                    each = keras.losses.sparse_categorical_crossentropy(y, self(x, training=True), from_logits=True)
                    loss = each if kind == "per sample" else tf.reduce_mean(each)
                    tf.print("not in the check")
            variables = self.dense.trainable_variables
            gradients = tape.gradient(loss, variables)
            if kind == "clips reduced":
                gradients = npu.distribute.all_reduce(gradients)
            if kind.startswith("clips"):
                gradients, _ = tf.clip_by_global_norm(gradients, 99.0)  # never that large
            if kind == "by hand":
                for variable, gradient in zip(variables, gradients):
                    variable.assign(tf.convert_to_tensor(variable) - 0.1 * gradient)
            elif kind == "applies in a branch":
                apply = self.optimizer.apply_gradients
                tf.cond(loss > -1.0, lambda: (apply(zip(gradients, variables)), 0)[1], lambda: 0)
            else:
                self.optimizer.apply_gradients(zip(gradients, variables))
            if "bank" in kind:
                out = npu.distribute.all_gather(self(x)) if "gathered" in kind else self(x)
                self.bank.assign(tf.concat([out, tf.convert_to_tensor(self.bank)], axis=0)[:8])  # set here
            elif kind == "counter":
                self.seen.assign_add(tf.cast(tf.shape(x)[0], tf.float32))
            return {"value": tf.reduce_mean(loss)}

    model = Model()
    model.compile(keras.optimizers.SGD(0.1), run_eagerly=kind == "eager")
    if kind == "pairs":
        whole = tf.data.Dataset.from_tensors(np.stack([x, x + 1]))
        data = {"x": whole, "verbose": 0}
    elif kind == "pairs of any number":
        whole = tf.data.Dataset.from_generator(
            lambda: [np.stack([x, x + 1])], output_signature=tf.TensorSpec([None, 12, 6])
        )
        data = {"x": whole, "verbose": 0}
    elif kind.startswith("fixed size"):
        whole = tf.data.Dataset.from_tensor_slices((x, y)).batch(6, drop_remainder=True)
        data = {"x": whole, "verbose": 0}
    return model, data


def _with_function(data: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """A built model that calls a function of its own, which keeps what it has been traced to."""
    keras = tf.keras

    class Model(keras.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.dense, self.dropout = keras.layers.Dense(3), keras.layers.Dropout(0.5)
            self.forward = tf.function(lambda x: self.dense(self.dropout(x, training=True)))

        def call(self, x: Any) -> Any:
            return self.forward(x)

    model = Model()
    model.dense.build((None, 6))
    model(data["x"][:2])
    model.compile(keras.optimizers.SGD(0.1), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    batches = tf.data.Dataset.from_tensor_slices((data["x"], data["y"])).batch(SAMPLES)
    return model, {"x": batches, "verbose": 0}


def _functional(kind: str, data: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    keras = tf.keras
    layers = keras.layers

    class AddsSum(layers.Layer):  # type: ignore[misc]
        def call(self, values: Any) -> Any:
            self.add_loss(1e-4 * tf.reduce_sum(values**2))
            return values

    class Drops(layers.Layer):  # type: ignore[misc]
        def call(self, values: Any, training: bool = False) -> Any:
            return values * tf.floor(0.8 + tf.random.uniform([tf.shape(values)[0], 1])) if training else values

    class Reshapes(layers.Layer):  # type: ignore[misc]
        def call(self, values: Any) -> Any:
            return tf.reshape(values, [SAMPLES, 4])

    def valid_steps(y: Any, out: Any) -> Any:
        y = tf.reshape(y, [-1])  # tf-keras gives it a second axis
        each = keras.losses.sparse_categorical_crossentropy(y, out, from_logits=True)
        valid = tf.cast(y != 0, each.dtype)
        return tf.reduce_sum(each * valid) / tf.reduce_sum(valid)

    per_sample = keras.losses.sparse_categorical_crossentropy
    losses = {
        "mean": lambda y, out: tf.reduce_mean(per_sample(y, out, from_logits=True)),
        "sum": lambda y, out: tf.reduce_sum(per_sample(y, out, from_logits=True)),
        "valid steps": valid_steps,
    }
    inputs = keras.Input([6])
    hidden = layers.Dense(4, activation="tanh")(inputs)
    if kind == "added sum":
        hidden = AddsSum()(hidden)
    elif kind == "noise":
        hidden = Drops()(layers.Dropout(0.9)(layers.BatchNormalization()(hidden)))
    elif kind == "size in a layer":
        hidden = Reshapes()(hidden)
    elif kind == "mixing operation":
        mean = getattr(keras, "ops", tf).mean if hasattr(keras, "ops") else tf.reduce_mean
        hidden = hidden - mean(hidden, axis=0)
    model = keras.Model(inputs, layers.Dense(3)(hidden))
    loss = losses.get(kind, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.compile(keras.optimizers.SGD(0.1), loss)
    if kind == "size in a layer":
        whole = tf.data.Dataset.from_tensor_slices((data["x"], data["y"])).batch(SAMPLES, drop_remainder=True)
        data = {"x": whole, "verbose": 0}
    return model, data
