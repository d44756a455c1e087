"""The broadcasting callback, in ``fit``, under either Keras."""

from __future__ import annotations

from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from fit_models import descend
from heard import error_of, warnings_of_package
from pool import Pool

import npu_device as npu
from npu_device._src.training.training_state import training_variables
from npu_device.distribute.hccl import npu_callbacks_append
from npu_device.distribute.npu_callbacks import NPUBroadcastGlobalVariablesCallback, npu_broadcast_scope_wrapper

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
            return {"loss": descend(self, lambda: tf.reduce_mean(tf.square(self(x, training=True) - y)))}

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
    return error_of(model.fit, x, y, verbose=0, callbacks=[NPUBroadcastGlobalVariablesCallback(0)])


def body_warned(case: str) -> list[str]:
    """Fit a model whose optimizer state can't be sent, or not in time: the warnings of the package."""
    npu.open()
    x, y = data()
    eager = case == "eager_steps"
    model = make_model("untraceable" if eager else "sharded")
    compile_model(model, "adam", wrap=eager, run_eagerly=eager, steps_per_execution=2 if eager else 1)
    with warnings_of_package() as warnings:
        model.fit(x, y, batch_size=3, verbose=0, callbacks=[NPUBroadcastGlobalVariablesCallback(0)])
    return warnings


def body_fit(built: bool) -> Any:
    handle = npu.open()
    root = handle.workers_num - 1
    tf.keras.utils.set_random_seed(handle.worker_id)

    class Subclass(tf.keras.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.dense = tf.keras.layers.Dense(3)
            self.norm = tf.keras.layers.BatchNormalization()

        def call(self, x: Any, training: bool = False) -> Any:
            return self.norm(self.dense(x), training=training)

    model = Subclass()
    if built:
        model(tf.ones([1, 2]))
        initial = model.get_weights()
    else:
        initial = []
    model.compile(optimizer=tf.keras.optimizers.SGD(0.0), loss="mse")
    callback = NPUBroadcastGlobalVariablesCallback(root)
    x = np.ones([8, 2], np.float32) * (handle.worker_id + 1)
    model.fit(x, np.ones([8, 3], np.float32), batch_size=8, epochs=1, verbose=0, callbacks=[callback])
    after_first = [np.asarray(value) for value in model.trainable_variables]
    model.trainable_variables[0].assign_add(tf.ones([2, 3]) * handle.worker_id)
    model.fit(x, np.ones([8, 3], np.float32), batch_size=8, epochs=1, verbose=0, callbacks=[callback])
    return initial, after_first, np.asarray(model.trainable_variables[0])


@pytest.mark.parametrize("built", [True, False], ids=["built", "built by its first step"])
def test_broadcasts_once_at_the_first_batch(keras_ranks: Pool, built: bool) -> None:
    results = keras_ranks.run(body_fit, built)
    root = results[-1]
    for rank, (initial, after_first, later) in enumerate(results):
        np.testing.assert_array_equal(
            after_first[0], root[not built][0], err_msg="learning rate 0: the weights are the root's initial ones"
        )
        np.testing.assert_allclose(
            later, root[1][0] + rank, rtol=1e-6, err_msg="the second fit must not broadcast again"
        )
        if built and rank < len(results) - 1:
            assert not np.array_equal(initial[0], root[0][0])


def body_append() -> Any:
    mine = ["first"]
    returned = npu_callbacks_append(mine)
    fresh = npu_callbacks_append(("a", "tuple"))
    return returned is mine, len(returned), len(fresh), isinstance(fresh[0], NPUBroadcastGlobalVariablesCallback)


def test_npu_callbacks_append(keras_ranks: Pool) -> None:
    assert set(keras_ranks.run(body_append)) == {(True, 2, 1, True)}


def body_scope() -> Any:
    rank = npu.open().worker_id
    strategy = tf.distribute.OneDeviceStrategy("CPU:0")
    same = npu_broadcast_scope_wrapper(strategy) is strategy
    tf.keras.utils.set_random_seed(rank)
    with strategy.scope():
        counter = tf.Variable(float(rank), trainable=False)
        model = tf.keras.Sequential([tf.keras.Input([2]), tf.keras.layers.Dense(3)])
    with strategy.scope():
        later = tf.Variable(float(rank))
    inside = float(strategy.run(lambda: later + 1.0))
    return same, model.get_weights()[0].tolist(), float(counter), float(later), inside


def test_variables_of_a_strategys_scope(keras_two_ranks: Pool) -> None:
    results = keras_two_ranks.run(body_scope)
    for rank, (same, weights, counter, later, inside) in enumerate(results):
        assert same
        assert weights == results[0][1]
        assert (counter, later, inside) == (rank, rank, rank + 1), "nothing but the first trainable ones is sent"


ONLY_KERAS_2 = pytest.mark.only_keras("2")
# The model, its optimizer, and the ranks on which the model is built before fit.
CASES = [
    "functional-adam-nowhere",
    "subclass-ema-fresh",
    "gan-adam-root",
    "functional-scaled-nowhere",
    "sequential-adam-nowhere",
    "subclass-scaled-root",
    "own_step-ema-everywhere",
    "own_step-adam-fresh",
    "gan-adam-fresh",
    "untraceable-adam-everywhere",
    "untraceable-adam-fresh",
    # Keras 3 has no legacy optimizers, and restores no checkpoint into a model that isn't built.
    pytest.param("functional-legacy_scaled-nowhere", marks=ONLY_KERAS_2),
    pytest.param("own_step-legacy-root", marks=ONLY_KERAS_2),
    pytest.param("subclass-adam-nowhere", marks=ONLY_KERAS_2),
]


@pytest.mark.parametrize("case", CASES)
def test_training_goes_on_from_the_checkpoint_of_the_root_as_in_one_process(
    keras_ranks: Pool, tmp_path: Path, case: str
) -> None:
    results = keras_ranks.run(body_resume, str(tmp_path), *case.split("-"))
    of_root, expected, _ = results[0]
    assert len(expected) > 4
    for own, of_one_process in zip_longest(of_root, expected):
        np.testing.assert_allclose(own, of_one_process, rtol=2e-4, atol=2e-6, err_msg="one process")
    for rank, (after, _, warnings) in enumerate(results):
        assert not warnings
        for own, of_rank_0 in zip_longest(after, of_root):
            np.testing.assert_array_equal(own, of_rank_0, err_msg=f"rank {rank} and rank 0")


def test_a_model_that_cant_be_built_before_its_first_step(keras_two_ranks: Pool) -> None:
    for error in keras_two_ranks.run(body_uncallable):
        assert "What to do: build the model before fit, on every rank" in error


@pytest.mark.parametrize("case", ["sharded", "eager_steps"])
def test_what_cant_be_sent_before_the_first_step_is_said(keras_two_ranks: Pool, case: str) -> None:
    part = {"sharded": "the optimizers of the ranks have different variables", "eager_steps": "in the first 2 steps"}[
        case
    ]
    for warnings in keras_two_ranks.run(body_warned, case):
        assert len(warnings) == 1
        assert part in warnings[0]
        assert "What to do: " in warnings[0]
