"""Calls of Ascend under either Keras: the broadcasting callback, in ``fit``; ``grouping_gradients_apply`` and
``grouping_broadcast``, whose sharded update equals the plain one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fit_models
import numpy as np
import pytest
import tensorflow as tf
from caught_messages import error_of, warnings_of_package
from fit_models import samples
from pool import Pool
from rank_comparison import same, same_bits

import npu_device as npu
from npu_device._src.training.watching.training_state import training_variables
from npu_device.distribute.hccl import npu_callbacks_append
from npu_device.distribute.npu_callbacks import (
    NPUBroadcastGlobalVariablesCallback,
    npu_broadcast_scope_wrapper,
)

ROWS = 12
STEPS = 3


def make_model(shape: str) -> Any:
    """Return an uncompiled model: one of ``fit_models``; ``own_step`` with a ``train_step`` of its own; ``untraceable``
    with one that only runs eagerly; ``sharded`` with a share of the optimizer's state on each rank; ``gan`` with two
    optimizers.
    """
    if shape in ("functional", "unbuilt", "subclassed"):
        return fit_models.make_model(shape)
    crossentropy = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    class OwnStep(type(fit_models.make_model("subclassed"))):  # type: ignore[misc]
        def train_step(self, batch: Any) -> Any:
            x, y = batch
            with tf.GradientTape() as tape:
                loss = crossentropy(y, self(x, training=True))
            self.learn(tape.gradient(loss, self.trainable_variables))
            return {"loss": loss}

        def learn(self, gradients: Any) -> None:
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))

    class Untraceable(OwnStep):
        def train_step(self, batch: Any) -> Any:
            return {"loss": float(super().train_step(batch)["loss"].numpy())}

    class Sharded(OwnStep):
        def learn(self, gradients: Any) -> None:
            pairs = zip(npu.distribute.all_reduce(gradients, "mean"), self.trainable_variables)
            npu.distribute.grouping_gradients_apply(self.optimizer.apply_gradients, pairs)

    class Gan(OwnStep):
        optimizer_of_first: Any = None

        def learn(self, gradients: Any) -> None:
            pairs, count = (
                list(zip(gradients, self.trainable_variables)),
                len(self.hidden.trainable_variables),
            )
            self.optimizer_of_first.apply_gradients(pairs[:count])
            self.optimizer.apply_gradients(pairs[count:])

    return {"own_step": OwnStep, "untraceable": Untraceable, "sharded": Sharded, "gan": Gan}[
        shape
    ]()


def compile_model(model: Any, kind: str, wrap: bool, **keywords: Any) -> None:
    """Compile with one optimizer with slots, wrapped or not, or two."""
    keras = tf.keras
    optimizers = keras.optimizers
    scaling = (
        getattr(keras.mixed_precision, "LossScaleOptimizer", None) or optimizers.LossScaleOptimizer
    )
    make: Any = {
        "adam": lambda: optimizers.Adam(0.05),
        "ema": lambda: optimizers.SGD(0.05, momentum=0.9, use_ema=True, ema_overwrite_frequency=3),
        "scaled": lambda: scaling(optimizers.Adam(0.05), dynamic_growth_steps=2),
        "legacy_scaled": lambda: scaling(optimizers.legacy.Adam(0.05), dynamic_growth_steps=2),
    }[kind]
    wrapped = (
        npu.distribute.npu_distributed_keras_optimizer_wrapper
        if wrap
        else lambda optimizer: optimizer
    )
    if hasattr(model, "optimizer_of_first"):
        model.optimizer_of_first = wrapped(make())
    model.compile(
        wrapped(make()), keras.losses.SparseCategoricalCrossentropy(from_logits=True), **keywords
    )


def body_resume(
    directory: str, shape: str, kind: str, built: str
) -> tuple[list[Any], list[Any] | None, list[str]]:
    """Train in one process, and save, on rank 0; let rank 0 alone restore that, and train on all ranks.

    The model is ``built`` before ``fit`` ``nowhere``, ``everywhere`` or on the ``root``; with ``fresh`` nobody restores
    anything. Return all values after training; those of one process that goes on (on rank 0, else None); the warnings.
    """
    rank, size = npu.distribute.rank(), npu.distribute.size()
    x, y = samples(ROWS)
    options = {"run_eagerly": True} if shape == "untraceable" else {}

    def checkpoint_of(model: Any) -> Any:
        more = {"other": model.optimizer_of_first} if hasattr(model, "optimizer_of_first") else {}
        return tf.train.Checkpoint(model=model, optimizer=model.optimizer, **more)

    def train(model: Any, rows: slice, *callbacks: Any) -> None:
        given = {
            "batch_size": rows.stop - rows.start,
            "epochs": STEPS,
            "shuffle": False,
            "verbose": 0,
        }
        model.fit(x[rows], y[rows], **given, callbacks=list(callbacks))

    written, expected = "", None
    if rank == 0:
        one = make_model(shape)
        compile_model(one, kind, wrap=False, **options)
        if built != "fresh":
            train(one, slice(0, ROWS))
            written = checkpoint_of(one).write(str(Path(directory) / "checkpoint"))
        train(one, slice(0, ROWS))
        expected = [np.asarray(variable) for variable in training_variables(one)]

    model = make_model(shape)
    compile_model(model, kind, wrap=True, **options)
    if built == "everywhere" or (built == "root" and rank == 0):
        model(x)
    if written:
        checkpoint_of(model).restore(written)
    with warnings_of_package() as warnings:
        mine = slice(rank * ROWS // size, (rank + 1) * ROWS // size)
        train(model, mine, NPUBroadcastGlobalVariablesCallback(0))
    return [np.asarray(variable) for variable in training_variables(model)], expected, warnings


def body_unsendable(case: str) -> tuple[str, list[str]]:
    """Fit a model that isn't built and can't be called, or whose optimizer state can't be sent, or not in time; return
    the error, and the warnings of the package.
    """

    class Uncallable(tf.keras.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.dense = tf.keras.layers.Dense(2)

        def call(self, x: Any) -> Any:
            raise NotImplementedError("a model of parts")

        def train_step(self, batch: Any) -> Any:
            return {"loss": tf.reduce_mean(self.dense(batch[0]))}

    x, y = samples(ROWS)
    eager = case != "sharded"
    model = Uncallable() if case == "uncallable" else make_model(case)
    compile_model(
        model,
        "adam",
        wrap=eager,
        run_eagerly=eager,
        steps_per_execution=2 if case == "untraceable" else 1,
    )
    with warnings_of_package() as warnings:
        error = error_of(
            model.fit,
            x,
            y,
            batch_size=3,
            verbose=0,
            callbacks=[NPUBroadcastGlobalVariablesCallback(0)],
        )
    return error, warnings


def body_fit(built: bool) -> Any:
    """Return the weights before, after the first and after the second ``fit`` with the callback, of the last rank."""
    rank = npu.distribute.rank()
    tf.keras.utils.set_random_seed(rank)
    model = tf.keras.Sequential([tf.keras.layers.Dense(3), tf.keras.layers.BatchNormalization()])
    if built:
        model.build([None, 2])
    found = [model.get_weights()[0] if built else None]
    model.compile(optimizer=tf.keras.optimizers.SGD(0.0), loss="mse")
    x, y = np.full([8, 2], rank + 1, np.float32), np.ones([8, 3], np.float32)
    sends = NPUBroadcastGlobalVariablesCallback(npu.distribute.size() - 1)
    for _ in range(2):
        model.fit(x, y, batch_size=8, verbose=0, callbacks=[sends])
        found.append(model.get_weights()[0])
        model.trainable_variables[0].assign_add(tf.fill([2, 3], float(rank)))
    return found


@pytest.mark.parametrize("built", [True, False], ids=["built", "built by its first step"])
def test_broadcasts_once_at_the_first_batch(several_keras_ranks: Pool, built: bool) -> None:
    results = several_keras_ranks.run(body_fit, built)
    initial, first, _ = results[-1]
    for rank, (own, after, later) in enumerate(results):
        # The learning rate is 0: the weights are the root's initial ones.
        np.testing.assert_array_equal(after, initial if built else first)
        np.testing.assert_allclose(
            later, first + rank, rtol=1e-6, err_msg="the second fit must not broadcast again"
        )
        if built and rank < len(results) - 1:
            assert not np.array_equal(own, initial)


def body_scope() -> Any:
    rank = npu.open().worker_id
    strategy = tf.distribute.OneDeviceStrategy("CPU:0")
    unchanged = npu_broadcast_scope_wrapper(strategy) is strategy
    tf.keras.utils.set_random_seed(rank)
    with strategy.scope():
        counter = tf.Variable(float(rank), trainable=False)
        model = tf.keras.Sequential([tf.keras.Input([2]), tf.keras.layers.Dense(3)])
    with strategy.scope():
        later = tf.Variable(float(rank))
    inside = float(strategy.run(lambda: later + 1.0))
    mine = ["first"]
    assert npu_callbacks_append(mine) is mine and len(mine) == 2
    [fresh] = npu_callbacks_append(("a", "tuple"))
    assert isinstance(fresh, NPUBroadcastGlobalVariablesCallback)
    return unchanged, model.get_weights()[0].tolist(), float(counter), float(later), inside


def test_variables_of_a_strategys_scope_and_npu_callbacks_append(keras_two_ranks: Pool) -> None:
    results = keras_two_ranks.run(body_scope)
    for rank, (unchanged, weights, *others) in enumerate(results):
        assert unchanged and weights == results[0][1]
        assert others == [rank, rank, rank + 1], "nothing but the first trainable ones is sent"


# The model, its optimizer, and the ranks on which the model is built before fit.
CASES = [
    # Its parts occur in others.
    pytest.param("functional-adam-nowhere", marks=pytest.mark.full),
    "subclassed-ema-fresh",
    "gan-adam-root",
    "unbuilt-scaled-nowhere",
    "own_step-ema-everywhere",
    "untraceable-adam-fresh",
    # Keras 3 has no legacy optimizers.
    pytest.param("functional-legacy_scaled-nowhere", marks=pytest.mark.only_keras("2")),
]


@pytest.mark.parametrize("case", CASES)
def test_training_goes_on_from_the_checkpoint_of_the_root_as_in_one_process(
    keras_ranks: Pool, tmp_path: Path, case: str
) -> None:
    results = keras_ranks.run(body_resume, str(tmp_path), *case.split("-"))
    of_root, expected, _ = results[0]
    assert len(expected) > 4
    same(of_root, expected, 1e-4)
    same_bits(*(after for after, _, _ in results))
    assert not any(warnings for *_, warnings in results)


@pytest.mark.once
def test_what_cant_be_sent_before_the_first_step_is_said(keras_two_ranks: Pool) -> None:
    for error, _ in keras_two_ranks.run(body_unsendable, "uncallable"):
        assert "What to do: build the model before fit, on every rank" in error
    parts = {
        "sharded": "the optimizers of the ranks have different variables",
        "untraceable": "in the first 2 steps",
    }
    for case, part in parts.items():
        for error, [warning] in keras_two_ranks.run(body_unsendable, case):
            assert error == "" and part in warning and "What to do: " in warning


def _scaling() -> Any:
    keras = tf.keras
    return (
        getattr(keras.optimizers, "LossScaleOptimizer", None)
        or keras.mixed_precision.LossScaleOptimizer
    )


def _state(optimizer: Any) -> list[Any]:
    return list(optimizer.variables() if callable(optimizer.variables) else optimizer.variables)


def body_sharded(graph: bool, kind: str) -> Any:
    def train(sharded: bool) -> Any:
        optimizers = tf.keras.optimizers
        variables = [tf.Variable(tf.fill(shape, 1.0)) for shape in ([3, 2], [5], [], [4, 4], [2])]
        make: dict[str, Any] = {
            "adam": lambda: optimizers.Adam(0.1),
            "clips": lambda: optimizers.Adam(0.1, global_clipnorm=0.7),
            "scales": lambda: _scaling()(optimizers.Adam(0.1), dynamic_growth_steps=2),
        }
        optimizer = make[kind]()

        def step(scale: Any, bad: Any) -> None:
            gradients = [tf.ones(v.shape) * (i + 1.0) * scale for i, v in enumerate(variables)]
            gradients[1] *= bad  # of the first rank's share
            pairs = list(zip(gradients, variables))
            if sharded:
                npu.distribute.grouping_gradients_apply(optimizer.apply_gradients, pairs)
            else:
                optimizer.apply_gradients(pairs)

        call = tf.function(step) if graph else step
        for number, scale in enumerate((1.0, -0.5, 2.0, 1.0)):
            is_bad = kind == "scales" and number == 2
            call(tf.constant(scale), tf.constant(float("inf") if is_bad else 1.0))
        size = sum(int(np.prod(v.shape)) for v in _state(optimizer) if len(v.shape))
        return [v.numpy() for v in variables], size

    sharded, sharded_state = train(True)
    plain, plain_state = train(False)
    equal = [np.array_equal(a, b) for a, b in zip(sharded, plain)]
    return equal, sharded_state, plain_state


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("kind", ["adam", "clips", "scales"])
def test_equal_to_the_plain_update(keras_ranks: Pool, graph: bool, kind: str) -> None:
    results = keras_ranks.run(body_sharded, graph, kind)
    for equal, state, plain_state in results:
        assert all(equal)
        if keras_ranks.size > 1:
            assert state < plain_state, "the optimizer's state is sharded"
    assert sum(state for _, state, _ in results) == results[0][2], (
        "each rank holds its own share of the state"
    )


def body_refused() -> list[str]:
    optimizer = _scaling()(tf.keras.optimizers.Adam(0.1, global_clipnorm=1.0))
    pairs = [(tf.ones([]), tf.Variable(1.0)) for _ in range(4)]
    found = [error_of(npu.distribute.grouping_gradients_apply, optimizer.apply_gradients, pairs)]
    return [*found, error_of(npu.distribute.grouping_broadcast, [tf.Variable([1.0])])]


def test_what_cannot_be_divided_is_refused(keras_two_ranks: Pool) -> None:
    for clips, single in keras_two_ranks.run(body_refused):
        assert "clips by global_clipnorm, for which it needs all gradients" in clips
        assert "can't be divided among" in single
