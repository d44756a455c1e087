"""The optimizer wrapper: N ranks with batch b do what one process does with batch N·b, under either Keras and in every
way to train.

The reference is computed on each rank by itself with a plain optimizer on the whole batch.
"""

from __future__ import annotations

import copy
import functools
import itertools
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from collective_bodies import wrong_refusals
from fit_models import descend
from pool import Pool
from rank_comparison import same, same_bits
from versions import needs_keras_3

import npu_device as npu
from npu_device.distribute.hccl import npu_callbacks_append

BATCH = 4
TOLERANCE = 2e-6  # of weights of order one after three steps, float32


def _model(seed: int = 1) -> Any:
    keras = tf.keras
    keras.utils.set_random_seed(seed)
    return keras.Sequential(
        [keras.Input([5]), keras.layers.Dense(7, activation="tanh"), keras.layers.Dense(1)]
    )


def _batches(steps: int, rank: int | None = None) -> list[tuple[np.ndarray, np.ndarray]]:
    """The batches of all ranks together, or the share of one rank."""
    size, found = npu.distribute.size(), []
    for step in range(steps):
        x = np.random.default_rng(step).standard_normal([BATCH * size, 5]).astype(np.float32)
        mine = slice(None) if rank is None else slice(rank * BATCH, (rank + 1) * BATCH)
        found.append((x[mine], (x.sum(axis=1, keepdims=True) * 3).astype(np.float32)[mine]))
    return found


def _optimizer(kind: str) -> Any:
    """Return an optimizer; one of a class of the script's own, as the model garden's AdamWeightDecay is one."""
    optimizers = tf.keras.optimizers
    if kind == "of the script":
        base = optimizers.SGD if hasattr(tf.keras, "ops") else optimizers.legacy.SGD

        class Clipping(base):  # type: ignore[misc, valid-type]
            def apply_gradients(self, grads_and_vars: Any, **keywords: Any) -> Any:
                gradients, variables = zip(*grads_and_vars)
                gradients, _ = tf.clip_by_global_norm(gradients, clip_norm=0.2)
                return super().apply_gradients(zip(gradients, variables), **keywords)

        return Clipping(0.1)
    return (optimizers.legacy if kind == "legacy" else optimizers).SGD(
        0.1, momentum=0.9, global_clipnorm=0.5
    )


def _train(model: Any, optimizer: Any, batches: list[Any], graph: bool) -> Any:
    def step(x: Any, y: Any) -> None:
        descend(model, lambda: tf.reduce_mean(tf.square(model(x, training=True) - y)), optimizer)

    call = tf.function(step) if graph else step
    for x, y in batches:
        call(tf.constant(x), tf.constant(y))
    return model.get_weights()


wrap = npu.distribute.npu_distributed_keras_optimizer_wrapper


def body_custom_loop(kind: str, graph: bool) -> Any:
    rank = npu.distribute.rank()
    model = _model(seed=rank)
    npu.distribute.broadcast(model.trainable_variables, root_rank=0)
    plain = _optimizer(kind)
    wrapped = wrap(plain, reduce_reduction="mean")
    assert wrapped is plain
    weights = _train(model, wrapped, _batches(3, rank), graph)
    same(weights, _custom_loop_alone(kind), TOLERANCE)
    return weights


@functools.cache
def _custom_loop_alone(kind: str) -> Any:
    """The weights that one process gets, once for the eager loop and the one in a graph."""
    return _train(_model(seed=0), _optimizer(kind), _batches(3), graph=True)


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize(
    "kind", ["new", "of the script", pytest.param("legacy", marks=pytest.mark.only_keras("2"))]
)
def test_custom_loop_equals_one_process(keras_ranks: Pool, kind: str, graph: bool) -> None:
    same_bits(*keras_ranks.run(body_custom_loop, kind, graph))


def body_fit(steps_per_execution: int, eagerly: bool, scaled: bool) -> Any:
    model, optimizer = _model(seed=npu.distribute.rank()), tf.keras.optimizers.Adam(0.05)
    late = eagerly or steps_per_execution == 4  # after compile
    optimizer = optimizer if late else wrap(optimizer)
    if scaled:
        optimizer = npu.train.optimizer.NpuLossScaleOptimizer(optimizer)
    model.compile(
        optimizer=optimizer,
        loss="mse",
        steps_per_execution=steps_per_execution,
        run_eagerly=eagerly,
    )
    if late:
        wrap(model.optimizer)
    x, y = map(np.concatenate, zip(*_batches(4, npu.distribute.rank())))
    model.fit(
        x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0, callbacks=npu_callbacks_append()
    )
    if scaled:
        assert (bool(optimizer.last_step_finite.numpy()), float(optimizer.loss_scale)) == (
            True,
            2.0**15,
        )
    same(model.get_weights(), _fit_alone(), 2e-5)  # eight Adam steps
    return model.get_weights()


@functools.cache
def _fit_alone() -> Any:
    """The weights that one process gets, once for all ways to fit."""
    model = _model(seed=0)
    model.compile(optimizer=tf.keras.optimizers.Adam(0.05), loss="mse")
    x, y = map(np.concatenate, zip(*_batches(4)))
    model.fit(x, y, batch_size=BATCH * npu.distribute.size(), epochs=2, shuffle=False, verbose=0)
    return model.get_weights()


@pytest.mark.parametrize(
    ("steps_per_execution", "eagerly", "scaled"),
    [
        (1, False, True),
        (2, False, False),
        pytest.param(4, False, False, marks=pytest.mark.full),
        (1, True, False),
    ],
)
def test_fit_equals_one_process(
    keras_ranks: Pool, steps_per_execution: int, eagerly: bool, scaled: bool
) -> None:
    same_bits(*keras_ranks.run(body_fit, steps_per_execution, eagerly, scaled))


def body_none_and_sparse() -> None:
    rank, size = npu.distribute.rank(), npu.distribute.size()

    def run(optimizer: Any, rows: list[int]) -> list[Any]:
        variables = [tf.Variable(tf.ones(shape)) for shape in ([6, 2], [2], [3])]
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(variables[0], rows) * variables[1])
        gradients = tape.gradient(loss, variables)
        assert isinstance(gradients[0], tf.IndexedSlices)
        assert gradients[2] is None
        optimizer.apply_gradients(zip(gradients, variables))
        return [variable.numpy() for variable in variables]

    def run_with_others(optimizer: Any, factor: float, graph: bool) -> list[Any]:
        """Train with gradients that aren't tensors: a running sum, an array, and a variable of Keras."""
        variables = [tf.Variable(tf.ones([3])) for _ in range(4)]
        others = [tf.Variable(tf.ones([3])), np.ones(3, np.float32), tf.ones([3])]
        others.append(getattr(tf.keras, "Variable", tf.Variable)(np.ones(3, np.float32)))
        others[0].assign(others[0] * factor)

        def step() -> None:
            optimizer.apply_gradients(zip(others, variables))

        (tf.function(step) if graph else step)()
        return [variable.numpy() for variable in variables]

    for graph in (False, True):
        for is_divided in (False, True):
            wrapped = wrap(tf.keras.optimizers.Adam(0.5), shard_optimizer=is_divided)
            mean = (size + 1) / 2
            same(
                run_with_others(wrapped, rank + 1.0, graph),
                run_with_others(tf.keras.optimizers.Adam(0.5), mean, graph),
                TOLERANCE,
            )
    everybody = [[0, other, other] if other else [0, 5] for other in range(size)]
    for kind in (tf.keras.optimizers.SGD, tf.keras.optimizers.Adagrad):
        same(
            run(wrap(kind(1.0), "sum"), everybody[rank]),
            run(kind(1.0), list(itertools.chain(*everybody))),
            TOLERANCE,
        )


@pytest.mark.once
def test_missing_and_sparse_gradients_are_trained_as_one_process(keras_ranks: Pool) -> None:
    """Keras 3's Adagrad squares each row of an index by itself."""
    keras_ranks.run(body_none_and_sparse)


def _optimizers() -> dict[str, Any]:
    """Return makers of optimizers, by name and by what clips its gradients."""
    kinds, found = tf.keras.optimizers, {}
    for name in (
        "SGD",
        "Adam",
        "AdamW",
        "Adagrad",
        "Adadelta",
        "Adamax",
        "Nadam",
        "Ftrl",
        "RMSprop",
    ):
        found[name, ""] = functools.partial(getattr(kinds, name), 0.1)
    found["momentum", ""] = functools.partial(kinds.SGD, 0.1, momentum=0.9)
    for clip in ("clipnorm", "clipvalue", "global_clipnorm"):
        found["SGD", clip] = functools.partial(kinds.SGD, 1.0, **{clip: 0.05})
    found["SGD", "in the step"] = functools.partial(kinds.SGD, 1.0)
    if not hasattr(tf.keras, "ops"):
        found["legacy", ""] = functools.partial(kinds.legacy.Adam, 0.1)
        found["legacy", "clipnorm"] = functools.partial(kinds.legacy.SGD, 1.0, clipnorm=0.05)
    return found


def _tables(reduce: str, graph: bool, rank: int, size: int) -> dict[str, Any]:
    """Train a table by each optimizer, in a graph some, on the words of a rank; ``reduce`` says how it is reduced."""
    chosen = {
        key: make
        for key, make in _optimizers().items()
        if not graph or key[0] in ("SGD", "Adam", "legacy")
    }
    random = np.random.default_rng(1)
    words, targets = random.integers(0, 4, [12, 3]), random.normal(size=12).astype(np.float32)
    own = slice(rank * 12 // size, (rank + 1) * 12 // size)
    start = random.normal(size=[4, 2]).astype(np.float32)
    tables = {key: tf.Variable(start) for key in chosen}
    optimizers = {key: make() for key, make in chosen.items()}
    if reduce == "optimizer":
        optimizers = {key: wrap(optimizer) for key, optimizer in optimizers.items()}

    def step(words: tf.Tensor, targets: tf.Tensor) -> None:
        with tf.GradientTape(persistent=True) as tape:
            losses = {
                key: tf.reduce_mean(
                    tf.square(tf.reduce_sum(tf.gather(table, words), [1, 2]) - targets)
                )
                for key, table in tables.items()
            }
        for (name, clip), table in tables.items():
            gradients = [tape.gradient(losses[name, clip], table)]
            if reduce == "all_reduce":
                gradients = npu.distribute.all_reduce(gradients)
            if clip == "in the step" and reduce != "optimizer":
                gradients, _ = tf.clip_by_global_norm(gradients, 0.05)
            optimizers[name, clip].apply_gradients(zip(gradients, [table]))

    call = tf.function(step) if graph else step
    for _ in range(3):
        call(tf.constant(words[own]), tf.constant(targets[own]))
    clipped = (
        "in the step" if reduce == "optimizer" else None
    )  # before the optimizer reduces: not by any recipe
    return {" ".join(key): table.numpy() for key, table in tables.items() if key[1] != clipped}


def body_rows_of_a_table(graph: bool) -> None:
    alone = _tables("", False, 0, 1)
    for reduce in ("all_reduce", "optimizer"):
        found = _tables(reduce, graph, npu.distribute.rank(), npu.distribute.size())
        same(found, {key: alone[key] for key in found}, 1e-5)


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
def test_rows_of_a_table_are_updated_as_in_one_process(
    several_keras_ranks: Pool, graph: bool
) -> None:
    """A word that occurs more than once has as many rows, which some optimizers square, and clipping clips, singly."""
    several_keras_ranks.run(body_rows_of_a_table, graph)


def body_accumulation() -> None:
    def optimizer() -> Any:
        return tf.keras.optimizers.SGD(0.1, clipvalue=0.02, gradient_accumulation_steps=3)

    mine = _train(_model(0), wrap(optimizer()), _batches(6, npu.distribute.rank()), graph=True)
    same(mine, _train(_model(0), optimizer(), _batches(6), graph=True), TOLERANCE)
    assert np.abs(mine[0] - _model(0).get_weights()[0]).max() > 0.003


@needs_keras_3
def test_gradient_accumulation_of_keras_3(two_ranks: Pool) -> None:
    two_ranks.run(body_accumulation)


def body_mixed_precision() -> Any:
    rank = npu.distribute.rank()
    tf.keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        model = _model(0)
        is_keras_3 = hasattr(tf.keras, "ops")
        model.compile(
            optimizer=wrap(tf.keras.optimizers.SGD(0.01)),
            loss="mse",
            jit_compile="auto" if is_keras_3 else None,
        )
        x, y = _batches(2, rank)[rank]
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
    rank, model = npu.distribute.rank(), _model(0)
    batches = _batches(3, rank)
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


def test_a_saved_optimizer_is_loaded_with_its_wrapper(keras_two_ranks: Pool, tmp_path: Any) -> None:
    keras_two_ranks.run(body_save, str(tmp_path))


def body_refusals_and_copies() -> list[str]:
    optimizers = tf.keras.optimizers
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
        (
            "TypeError",
            "expected a Keras optimizer, or a name such as 'sgd'; found None",
            wrap,
            None,
        ),
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


def test_copies_of_optimizers_reduce_and_wrong_ones_are_errors(keras_ranks: Pool) -> None:
    assert keras_ranks.run(body_refusals_and_copies) == [[]] * keras_ranks.size
