"""Models in every state of being built, and one rank that has loaded a checkpoint: what the tests of the broadcasting
callback run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from heard import warnings_of_package

import npu_device as npu

ROWS = 12
STEPS = 3


def data() -> tuple[np.ndarray, np.ndarray]:
    """Return the global batch."""
    random = np.random.default_rng(3)
    return random.normal(size=(ROWS, 3)).astype(np.float32), random.normal(size=(ROWS, 2)).astype(np.float32)


def make_model(shape: str) -> Any:
    """Return an uncompiled model: ``functional``, ``sequential`` and ``subclass`` without an input shape, ``own_step``
    with a ``train_step`` of its own, ``untraceable`` with one that only runs eagerly, ``sharded`` with a
    share of the optimizer's state on each rank, ``gan`` with two optimizers.
    """
    keras = tf.keras

    class Inner(keras.layers.Layer):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.dense = keras.layers.Dense(4, activation="tanh")

        def call(self, x: Any) -> Any:
            return self.dense(x)

    class Subclass(keras.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = Inner(), keras.layers.Dense(2)

        def call(self, x: Any, training: bool = False) -> Any:
            return self.last(self.first(x))

    class OwnStep(Subclass):
        def train_step(self, batch: Any) -> Any:
            x, y = batch
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(self(x, training=True) - y))
            variables = self.trainable_variables
            self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
            return {"loss": loss}

    class Untraceable(OwnStep):
        def train_step(self, batch: Any) -> Any:
            losses = super().train_step(batch)
            return {name: float(loss.numpy()) for name, loss in losses.items()}

    class Sharded(Subclass):
        def train_step(self, batch: Any) -> Any:
            x, y = batch
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(self(x, training=True) - y))
            variables = self.trainable_variables
            gradients = npu.distribute.all_reduce(tape.gradient(loss, variables), "mean")
            npu.distribute.grouping_gradients_apply(self.optimizer.apply_gradients, zip(gradients, variables))
            return {"loss": loss}

    class Gan(Subclass):
        optimizer_of_first: Any = None

        def train_step(self, batch: Any) -> Any:
            x, y = batch
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(self(x, training=True) - y))
            first, last = self.first.trainable_variables, self.last.trainable_variables
            gradients = tape.gradient(loss, [*first, *last])
            self.optimizer_of_first.apply_gradients(zip(gradients[: len(first)], first))
            self.optimizer.apply_gradients(zip(gradients[len(first) :], last))
            return {"loss": loss}

    if shape == "functional":
        inputs = keras.Input([3])
        return keras.Model(inputs, keras.layers.Dense(2)(keras.layers.Dense(4, activation="tanh")(inputs)))
    if shape == "sequential":
        return keras.Sequential([keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(2)])
    classes = {"subclass": Subclass, "own_step": OwnStep, "untraceable": Untraceable, "sharded": Sharded, "gan": Gan}
    return classes[shape]()


def make_optimizer(kind: str) -> Any:
    """Return an optimizer with slots."""
    keras = tf.keras
    if kind == "adam":
        return keras.optimizers.Adam(0.05)
    if kind == "legacy":
        return keras.optimizers.legacy.Adam(0.05)
    if kind == "legacy_scaled":
        return keras.mixed_precision.LossScaleOptimizer(keras.optimizers.legacy.Adam(0.05), dynamic_growth_steps=2)
    if kind == "ema":
        return keras.optimizers.SGD(0.05, momentum=0.9, use_ema=True, ema_overwrite_frequency=3)
    home = keras.mixed_precision if hasattr(keras.mixed_precision, "LossScaleOptimizer") else keras.optimizers
    return home.LossScaleOptimizer(keras.optimizers.Adam(0.05), dynamic_growth_steps=2)


def compile_model(model: Any, kind: str, wrap: bool, **keywords: Any) -> None:
    """Compile with one wrapped optimizer, or two."""

    def made() -> Any:
        optimizer = make_optimizer(kind)
        return npu.distribute.npu_distributed_keras_optimizer_wrapper(optimizer) if wrap else optimizer

    if hasattr(model, "optimizer_of_first"):
        model.optimizer_of_first = made()
    model.compile(optimizer=made(), loss="mse", **keywords)


def values(model: Any) -> list[Any]:
    """Return the weights and the optimizers' state."""
    from npu_device._src.training.training_state import training_variables

    return [np.asarray(variable) for variable in training_variables(model)]


def body_resume(directory: str, shape: str, kind: str, built: str) -> tuple[list[Any], list[Any] | None, list[str]]:
    """Train in one process, and save, on rank 0; let rank 0 alone restore that, and train on all ranks.

    Args:
        directory: where to save.
        shape: of the model.
        kind: of the optimizer.
        built: the ranks on which the model is built before ``fit``: ``nowhere``, ``everywhere`` or ``root``; with
            ``fresh`` nobody restores anything, and no model is built.

    Returns:
        All values after training; those of one process that goes on (on rank 0, else None); the warnings of the
        package.
    """
    from npu_device.distribute.npu_callbacks import NPUBroadcastGlobalVariablesCallback

    handle = npu.open()
    rank, size = handle.worker_id, handle.workers_num
    x, y = data()
    options = {"run_eagerly": True} if shape == "untraceable" else {}

    def checkpoint_of(model: Any) -> Any:
        more = {"other": model.optimizer_of_first} if hasattr(model, "optimizer_of_first") else {}
        return tf.train.Checkpoint(model=model, optimizer=model.optimizer, **more)

    def train(model: Any, rows: slice, *callbacks: Any) -> None:
        model.fit(
            x[rows],
            y[rows],
            batch_size=rows.stop - rows.start,
            epochs=STEPS,
            shuffle=False,
            verbose=0,
            callbacks=list(callbacks),
        )

    written, expected = "", None
    if rank == 0:
        tf.keras.utils.set_random_seed(100)
        one = make_model(shape)
        compile_model(one, kind, wrap=False, **options)
        if built != "fresh":
            train(one, slice(0, ROWS))
            written = checkpoint_of(one).write(str(Path(directory) / "checkpoint"))
        train(one, slice(0, ROWS))
        expected = values(one)

    tf.keras.utils.set_random_seed(100 + rank)
    model = make_model(shape)
    compile_model(model, kind, wrap=True, **options)
    if built == "everywhere" or (built == "root" and rank == 0):
        model(x)
    if written:
        checkpoint_of(model).restore(written)
    with warnings_of_package() as warnings:
        mine = slice(rank * ROWS // size, (rank + 1) * ROWS // size)
        train(model, mine, NPUBroadcastGlobalVariablesCallback(0))
    return values(model), expected, warnings


def body_uncallable() -> str:
    """Fit a model that isn't built, runs eagerly and can't be called: the error."""
    from npu_device.distribute.npu_callbacks import NPUBroadcastGlobalVariablesCallback

    class Uncallable(tf.keras.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.dense = tf.keras.layers.Dense(2)

        def build(self, shape: Any) -> None:
            self.dense.build(shape)

        def call(self, x: Any) -> Any:
            raise NotImplementedError("a model of parts")

        def train_step(self, batch: Any) -> Any:
            return {"loss": tf.reduce_mean(self.dense(batch[0]))}

    npu.open()
    x, y = data()
    model = Uncallable()
    compile_model(model, "adam", wrap=True, run_eagerly=True)
    try:
        model.fit(x, y, verbose=0, callbacks=[NPUBroadcastGlobalVariablesCallback(0)])
    except RuntimeError as error:
        return str(error)
    return ""


def body_warned(case: str) -> list[str]:
    """Fit a model whose optimizer state can't be sent, or not in time: the warnings of the package."""
    from npu_device.distribute.npu_callbacks import NPUBroadcastGlobalVariablesCallback

    npu.open()
    x, y = data()
    eager = case == "eager_steps"
    model = make_model("untraceable" if eager else "sharded")
    compile_model(model, "adam", wrap=eager, run_eagerly=eager, steps_per_execution=2 if eager else 1)
    with warnings_of_package() as warnings:
        model.fit(x, y, batch_size=3, verbose=0, callbacks=[NPUBroadcastGlobalVariablesCallback(0)])
    return warnings
