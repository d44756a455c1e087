"""Models and data for the tests of ``npu.distribute.replicate``, and what comes of a training, in comparable form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

import npu_device as npu

SAMPLES = 97
CLASS_WEIGHT = {0: 2.0, 1: 1.0, 2: 0.5}


def samples(count: int = SAMPLES) -> tuple[np.ndarray, np.ndarray]:
    """Inputs [count, 6] and classes [count], from 0 to 2."""
    random = np.random.default_rng(5)
    x = random.standard_normal([count, 6]).astype(np.float32)
    y = np.argmax(x[:, :3] + 0.5 * x[:, 3:], axis=1).astype(np.int32)
    return x, y


def make_model(kind: str, directory: str = "") -> Any:
    """A model of each way to make one; with different weights on each rank, but rank 0's are the same always."""
    keras = tf.keras
    keras.utils.set_random_seed(7 + npu.open().worker_id)
    layers = keras.layers

    class Subclassed(keras.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.hidden = layers.Dense(8, activation="tanh")
            self.scores = layers.Dense(3)

        def call(self, x: Any, training: bool = False) -> Any:
            return self.scores(self.hidden(x))

    class OwnStep(Subclassed):
        def __init__(self) -> None:
            super().__init__()
            self.tracker = keras.metrics.Mean(name="tracker")
            self.right = keras.metrics.SparseCategoricalAccuracy(name="right")

        @property
        def metrics(self) -> Any:
            return [self.tracker, self.right]

        def train_step(self, data: Any) -> Any:
            x, y = data

            def loss_of() -> Any:
                scores = self(x, training=True)
                self.right.update_state(y, scores)
                return tf.reduce_mean(
                    keras.losses.sparse_categorical_crossentropy(y, scores, from_logits=True)
                )

            loss = descend(self, loss_of)
            self.tracker.update_state(loss)
            return {"renamed": self.tracker.result(), "right": self.right.result(), "raw": loss}

        def test_step(self, data: Any) -> Any:
            x, y = data
            self.right.update_state(y, self(x, training=False))
            return {"right": self.right.result()}

    if kind == "subclassed":
        return Subclassed()
    if kind == "own step":
        return OwnStep()
    stack = [
        layers.Dense(8, activation="tanh", kernel_regularizer=keras.regularizers.L2(0.01)),
        layers.Dense(3),
    ]
    if kind == "unbuilt":
        return keras.Sequential(stack)
    inputs = keras.Input([6])
    model = keras.Model(inputs, stack[1](stack[0](inputs)))
    if kind == "loaded":
        path = f"{directory}/rank{npu.open().worker_id}.keras"
        compile_model(model, "adam")
        model.optimizer.build(
            model.trainable_variables
        )  # or Keras 3 warns that the file holds another number of them
        model.save(path)
        return keras.models.load_model(path)
    return model


def make_optimizer(kind: str) -> Any:
    """An optimizer of each way to make one."""
    optimizers = tf.keras.optimizers
    if kind == "adam":
        return optimizers.Adam(0.02)
    if kind == "clipped":
        return optimizers.SGD(0.2, momentum=0.9, global_clipnorm=0.1)
    return optimizers.SGD(0.2, momentum=0.9)


def compile_model(model: Any, optimizer: str = "sgd") -> None:
    """Compile a model of ``make_model``."""
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=make_optimizer(optimizer), loss=loss, metrics=["accuracy"])


def replicated() -> Any:
    model = make_model("functional")
    compile_model(model)
    return npu.distribute.replicate(model)


def descend(
    model: Any,
    loss_of: Callable[[], Any],
    optimizer: Any = None,
    reduced: Callable[[Any], Any] = list,
) -> Any:
    """Make a step as custom loops do: apply the gradients of a loss, after they are ``reduced``; return the loss."""
    with tf.GradientTape() as tape:
        loss = loss_of()
    gradients = reduced(tape.gradient(loss, model.trainable_variables))
    (model.optimizer if optimizer is None else optimizer).apply_gradients(
        zip(gradients, model.trainable_variables)
    )
    return loss


def outcome(model: Any, history: Any, **more: Any) -> dict[str, Any]:
    """Return the results of a training, in arrays."""
    found = {"weights": model.get_weights(), "history": history.history, **more}
    return tf.nest.map_structure(np.asarray, found)  # type: ignore[no-any-return]
