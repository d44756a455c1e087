"""The optimizer wrapper: N ranks with batch b do what one process does with batch N·b, under either Keras and in every
way to train.

The reference is computed on each rank by itself with a plain optimizer on the whole batch.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from collective_bodies import wrong_refusals
from compared import same_bits
from fit_models import descend
from pool import Pool
from versions import needs_keras_3

import npu_device as npu
from npu_device.distribute.hccl import npu_callbacks_append

BATCH = 4
TOLERANCE = 2e-6
"""Largest absolute difference of weights of order one after three steps, float32."""


def _model(seed: int = 1) -> Any:
    keras = tf.keras
    keras.utils.set_random_seed(seed)
    return keras.Sequential([keras.Input([5]), keras.layers.Dense(7, activation="tanh"), keras.layers.Dense(1)])


def _batch(size: int, step: int) -> tuple[np.ndarray, np.ndarray]:
    """The whole batch of a step, the same on every rank."""
    random = np.random.default_rng(step)
    x = random.standard_normal([BATCH * size, 5]).astype(np.float32)
    return x, (x.sum(axis=1, keepdims=True) * 3).astype(np.float32)


def _share(whole: np.ndarray, rank: int) -> np.ndarray:
    return whole[rank * BATCH : (rank + 1) * BATCH]


def _optimizer(kind: str) -> Any:
    keras = tf.keras
    if kind == "legacy":
        return keras.optimizers.legacy.SGD(0.1, momentum=0.9, global_clipnorm=0.5)
    if kind == "adam":
        return keras.optimizers.Adam(0.05)
    if kind == "of the script":
        return _own_optimizer()
    return keras.optimizers.SGD(0.1, momentum=0.9, global_clipnorm=0.5)


def _own_optimizer() -> Any:
    """Return an optimizer of a class of the script's own, as the model garden's AdamWeightDecay is one."""
    base = tf.keras.optimizers.SGD if hasattr(tf.keras, "ops") else tf.keras.optimizers.legacy.SGD

    class Clipping(base):  # type: ignore[misc, valid-type]
        def apply_gradients(self, grads_and_vars: Any, **keywords: Any) -> Any:
            gradients, variables = zip(*grads_and_vars)
            gradients, _ = tf.clip_by_global_norm(gradients, clip_norm=0.2)
            return super().apply_gradients(zip(gradients, variables), **keywords)

    return Clipping(0.1)


def _difference(first: list[Any], second: list[Any]) -> float:
    return max(
        float(np.max(np.abs(np.asarray(a, np.float64) - np.asarray(b, np.float64)))) for a, b in zip(first, second)
    )


def _train(model: Any, optimizer: Any, batches: list[Any], graph: bool) -> None:
    def step(x: Any, y: Any) -> None:
        descend(model, lambda: tf.reduce_mean(tf.square(model(x, training=True) - y)), optimizer)

    call = tf.function(step) if graph else step
    for x, y in batches:
        call(tf.constant(x), tf.constant(y))


def body_custom_loop(kind: str, graph: bool) -> Any:
    handle = npu.open()
    rank, size = handle.worker_id, handle.workers_num
    whole = [_batch(size, step) for step in range(3)]
    model = _model(seed=rank)
    npu.distribute.broadcast(model.trainable_variables, root_rank=0)
    plain = _optimizer(kind)
    wrapped = npu.distribute.npu_distributed_keras_optimizer_wrapper(plain, reduce_reduction="mean")
    _train(model, wrapped, [(_share(x, rank), _share(y, rank)) for x, y in whole], graph)
    return wrapped is plain, model.get_weights(), _difference(model.get_weights(), _custom_loop_alone(kind, size))


@functools.cache
def _custom_loop_alone(kind: str, size: int) -> Any:
    """The weights that one process gets, once for the eager loop and the one in a graph."""
    model = _model(seed=0)
    _train(model, _optimizer(kind), [_batch(size, step) for step in range(3)], graph=True)
    return model.get_weights()


LEGACY = pytest.param("legacy", marks=pytest.mark.only_keras("2"))


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("kind", ["clipped by global norm", "of the script", LEGACY])
def test_custom_loop_equals_one_process(keras_ranks: Pool, kind: str, graph: bool) -> None:
    results = keras_ranks.run(body_custom_loop, kind, graph)
    for same, _, difference in results:
        assert same
        assert difference < TOLERANCE
    same_bits(*(weights for _, weights, _ in results))


def body_fit(steps_per_execution: int, eagerly: bool, scaled: bool) -> Any:
    handle = npu.open()
    rank, size = handle.worker_id, handle.workers_num
    whole = [_batch(size, step) for step in range(4)]
    model = _model(seed=rank)
    wrap = npu.distribute.npu_distributed_keras_optimizer_wrapper
    late = eagerly or steps_per_execution == 4  # after compile
    optimizer = _optimizer("adam") if late else wrap(_optimizer("adam"))
    if scaled:
        optimizer = npu.train.optimizer.NpuLossScaleOptimizer(optimizer)
    model.compile(optimizer=optimizer, loss="mse", steps_per_execution=steps_per_execution, run_eagerly=eagerly)
    if late:
        wrap(model.optimizer)
    x = np.concatenate([_share(x, rank) for x, _ in whole])
    y = np.concatenate([_share(y, rank) for _, y in whole])
    model.fit(x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0, callbacks=npu_callbacks_append())
    if scaled:
        assert (bool(optimizer.last_step_finite.numpy()), float(optimizer.loss_scale)) == (True, 2.0**15)
    return model.get_weights(), _difference(model.get_weights(), _fit_alone(size))


@functools.cache
def _fit_alone(size: int) -> Any:
    """The weights that one process gets, once for all ways to fit."""
    model = _model(seed=0)
    model.compile(optimizer=_optimizer("adam"), loss="mse")
    x, y = (np.concatenate(parts) for parts in zip(*(_batch(size, step) for step in range(4))))
    model.fit(x, y, batch_size=BATCH * size, epochs=2, shuffle=False, verbose=0)
    return model.get_weights()


@pytest.mark.parametrize(
    ("steps_per_execution", "eagerly", "scaled"),
    [(1, False, True), (2, False, False), (4, False, False), (1, True, False)],
)
def test_fit_equals_one_process(keras_ranks: Pool, steps_per_execution: int, eagerly: bool, scaled: bool) -> None:
    results = keras_ranks.run(body_fit, steps_per_execution, eagerly, scaled)
    assert max(difference for _, difference in results) < 2e-5  # eight Adam steps
    same_bits(*(weights for weights, _ in results))


def body_none_and_sparse() -> Any:
    handle = npu.open()
    rank, size = handle.worker_id, handle.workers_num

    def run(wrapped: bool, rows: list[int], kind: str) -> list[Any]:
        table = tf.Variable(tf.ones([6, 2]))
        dense = tf.Variable(tf.ones([2]))
        unused = tf.Variable(tf.ones([3]))
        optimizer = getattr(tf.keras.optimizers, kind)(1.0)
        if wrapped:
            optimizer = npu.distribute.npu_distributed_keras_optimizer_wrapper(optimizer, "sum")
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(table, rows) * dense)
        gradients = tape.gradient(loss, [table, dense, unused])
        assert isinstance(gradients[0], tf.IndexedSlices)
        assert gradients[2] is None
        optimizer.apply_gradients(zip(gradients, [table, dense, unused]))
        return [table.numpy(), dense.numpy(), unused.numpy()]

    mine = [0, rank, rank] if rank else [0, 5]
    everybody = [row for other in range(size) for row in ([0, other, other] if other else [0, 5])]
    return max(_difference(run(True, mine, kind), run(False, everybody, kind)) for kind in ("SGD", "Adagrad"))


def test_none_and_sparse_gradients(keras_ranks: Pool) -> None:
    """Keras 3's Adagrad squares each row of an index by itself."""
    assert max(keras_ranks.run(body_none_and_sparse)) < TOLERANCE


def body_accumulation() -> Any:
    handle = npu.open()
    rank, size = handle.worker_id, handle.workers_num
    whole = [_batch(size, step) for step in range(6)]
    shares = [(_share(x, rank), _share(y, rank)) for x, y in whole]

    def optimizer() -> Any:
        return tf.keras.optimizers.SGD(0.1, clipvalue=0.02, gradient_accumulation_steps=3)

    model, reference = _model(0), _model(0)
    _train(model, npu.distribute.npu_distributed_keras_optimizer_wrapper(optimizer()), shares, graph=True)
    _train(reference, optimizer(), whole, graph=True)
    return _difference(model.get_weights(), reference.get_weights()), _difference(
        model.get_weights(), _model(0).get_weights()
    )


@needs_keras_3
def test_gradient_accumulation_of_keras_3(ranks: Pool) -> None:
    for difference, moved in ranks.run(body_accumulation):
        assert difference < TOLERANCE
        assert moved > 0.003


def body_mixed_precision() -> Any:
    rank = npu.open().worker_id
    tf.keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        model = _model(0)
        wrapped = npu.distribute.npu_distributed_keras_optimizer_wrapper(tf.keras.optimizers.SGD(0.01))
        model.compile(optimizer=wrapped, loss="mse", jit_compile="auto" if hasattr(tf.keras, "ops") else None)
        x, y = _batch(1, step=rank)
        if rank == 0:
            y = y * 1e6  # overflows float16 on this rank only
        model.fit(x, y, batch_size=BATCH, epochs=5, verbose=0, shuffle=False)
        return type(model.optimizer).__name__, model.get_weights()
    finally:
        tf.keras.mixed_precision.set_global_policy("float32")


def test_compile_under_mixed_precision_wraps_the_wrapped(keras_two_ranks: Pool) -> None:
    results = keras_two_ranks.run(body_mixed_precision)
    for name, weights in results:
        assert "LossScaleOptimizer" in name
        assert all(np.all(np.isfinite(value)) for value in weights)
    same_bits(*(weights for _, weights in results))


def body_save(directory: str) -> None:
    wrap = npu.distribute.npu_distributed_keras_optimizer_wrapper
    rank, size = npu.distribute.rank(), npu.distribute.size()
    batches = [tuple(_share(part, rank) for part in _batch(size, step)) for step in range(3)]
    model = _model(0)
    model.compile(optimizer=wrap(tf.keras.optimizers.Adam(0.05)), loss="mse")
    for batch in batches[:2]:
        model.train_on_batch(*batch)
    path = f"{directory}/model{rank}.keras"
    model.save(path)
    loaded = tf.keras.models.load_model(path)
    assert loaded.optimizer.get_config() == model.optimizer.get_config()
    assert type(loaded.optimizer) is type(tf.keras.optimizers.Adam())
    same_bits(loaded.get_weights(), model.get_weights())
    wrap(loaded.optimizer)
    for each in (loaded, model):
        each.train_on_batch(*batches[2])
    same_bits(loaded.get_weights(), model.get_weights())


def test_saving_and_loading(keras_two_ranks: Pool, tmp_path: Any) -> None:
    keras_two_ranks.run(body_save, str(tmp_path))


def body_refusals_and_copies() -> list[str]:
    wrap, optimizers = npu.distribute.npu_distributed_keras_optimizer_wrapper, tf.keras.optimizers
    scaling = tf.keras.mixed_precision.LossScaleOptimizer
    plain = optimizers.SGD(1.0)
    config = plain.get_config()
    wrapped = wrap(plain)
    assert wrapped.get_config() == config and isinstance(wrap("sgd"), optimizers.Optimizer)
    # tf-keras's new optimizers can't be deep-copied, wrapped or not.
    copied = copy.deepcopy(wrapped) if hasattr(tf.keras, "ops") else wrap(optimizers.SGD(1.0))
    for optimizer in (wrapped, copied):  # a deep copy applies with its own state
        variable = tf.Variable(0.0)
        optimizer.apply_gradients([(tf.constant(1.0), variable)])
        assert (int(np.asarray(optimizer.iterations)), float(variable)) == (1, -1.0)
    cases: list[tuple[Any, ...]] = [
        ("TypeError", "expected a Keras optimizer, or a name such as 'sgd'; found None", wrap, None),
        ("ValueError", "median", wrap, optimizers.SGD(1.0), "median"),
    ]
    if npu.distribute.size() > 1:
        cases += [
            ("ValueError", "wrapped already", wrap, wrapped),
            ("ValueError", "wrapped already", wrap, scaling(wrap(optimizers.SGD(1.0)))),
            ("ValueError", "wrapped already", wrap, wrap(scaling(optimizers.SGD(1.0)))),
            ("TypeError", "expected a Keras optimizer", wrap, tf.Module()),
        ]
    return wrong_refusals(*cases)


def test_refusals_and_copies(keras_ranks: Pool) -> None:
    assert keras_ranks.run(body_refusals_and_copies) == [[]] * keras_ranks.size


def body_inner_wrapped_late() -> list[float]:
    last = npu.distribute.rank() == npu.distribute.size() - 1
    weight = tf.keras.Variable(tf.zeros([2]))
    inner = tf.keras.optimizers.SGD(1.0)
    outer = tf.keras.optimizers.LossScaleOptimizer(inner, initial_scale=1.0)
    outer.build([weight])
    npu.distribute.npu_distributed_keras_optimizer_wrapper(inner)
    values = []
    for gradient in (float("inf") if last else 1.0, 3.0 if last else 1.0):
        outer.apply_gradients([(tf.fill([2], gradient * float(outer.dynamic_scale)), weight)])
        values.append(float(tf.reduce_sum(weight)))
    return values


@pytest.mark.only_keras("3")
def test_an_inner_optimizer_that_is_wrapped_late(keras_two_ranks: Pool) -> None:
    """The ranks agree on the steps to skip: the gradients are reduced before Keras looks whether they are finite."""
    assert keras_two_ranks.run(body_inner_wrapped_late) == [[0.0, -4.0]] * 2
