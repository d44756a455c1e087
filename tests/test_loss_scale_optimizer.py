"""``npu.train.optimizer.NpuLossScaleOptimizer``, and the loss-scale optimizer of each Keras, around plain and wrapped
optimizers.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from collective_bodies import wrong_refusals
from pool import Pool

import npu_device as npu

PLACES = ("inner", "outer")
UNSCALED = "get_unscaled_gradients"
INFINITE = (
    False,
    True,
    False,
    False,
)  # whether the gradients of a step overflow, on the last rank only


def body_steps(kind: str, place: str, dynamic: bool, style: str, graph: bool) -> Any:
    return _steps(kind, place, dynamic, style, graph, run=lambda step, infinite: step(infinite))


def body_strategy(name: str) -> Any:
    strategy = getattr(tf.distribute, name)(["CPU:0"] if name == "MirroredStrategy" else "CPU:0")
    with strategy.scope():
        return _steps(
            "new", "inner", True, UNSCALED, True, run=lambda step, x: strategy.run(step, args=(x,))
        )


def _steps(kind: str, place: str, dynamic: bool, style: str, graph: bool, run: Any) -> Any:
    handle = npu.open()
    last = handle.worker_id == handle.workers_num - 1
    wrap = npu.distribute.npu_distributed_keras_optimizer_wrapper
    optimizers = tf.keras.optimizers.legacy if "legacy" in kind else tf.keras.optimizers
    optimizer, keras_class = (
        optimizers.SGD(0.5, momentum=0.5),
        tf.keras.mixed_precision.LossScaleOptimizer,
    )
    inner = optimizer
    if place == "inner":
        optimizer = wrap(optimizer, "sum")
    more = {"dynamic_growth_steps": 2} if dynamic else {}
    if kind.startswith("Keras"):
        optimizer = keras_class(optimizer, initial_scale=8.0, **more)
    else:
        optimizer = npu.train.optimizer.NpuLossScaleOptimizer(
            optimizer, dynamic=dynamic, initial_scale=8.0, **more
        )
        assert isinstance(optimizer, npu.train.optimizer.NpuLossScaleOptimizer)
        assert not optimizer.last_step_finite.numpy()
    if place == "outer":
        assert wrap(optimizer, "sum") is optimizer
    assert isinstance(optimizer, keras_class)
    variable, unused = tf.Variable([1.0, 1.0]), tf.Variable(1.0)
    table = tf.Variable(tf.ones([3, 2]))
    variables = [variable, table, unused]
    if place == "inner, late":
        optimizer.build(variables)
        wrap(inner, "sum")

    def step(infinite: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(variable) * float(handle.worker_id + 1) + tf.reduce_sum(
                tf.gather(table, [0, 0])
            )
            loss *= tf.where(infinite, float("inf"), 1.0)
            scaled = (
                optimizer.scale_loss(loss)
                if style == "scale_loss"
                else optimizer.get_scaled_loss(loss)
            )
        gradients = tape.gradient(scaled, variables)
        assert isinstance(gradients[1], tf.IndexedSlices)
        if style == "by hand":
            gradients = optimizer.get_unscaled_gradients(gradients)
            gradients = npu.distribute.all_reduce(gradients, "sum")
        elif style == UNSCALED:
            gradients = optimizer.get_unscaled_gradients(gradients)
        optimizer.apply_gradients(zip(gradients, variables))

    def whole(infinite: Any) -> None:
        run(step, infinite)

    call = tf.function(whole) if graph else whole
    trail = []
    for infinite in INFINITE:
        call(tf.constant(infinite and last))
        scale = (
            optimizer.loss_scale if hasattr(optimizer, "loss_scale") else optimizer.dynamic_scale
        )
        found = (
            variable.numpy().tolist(),
            table.numpy()[:, 0].tolist(),
            float(tf.convert_to_tensor(scale)),
        )
        if not kind.startswith("Keras"):
            iterations = int(tf.convert_to_tensor(optimizer.inner_optimizer.iterations))
            found += bool(optimizer.last_step_finite.numpy()), iterations  # type: ignore[assignment]
        trail.append(found)
    return trail


def _expected(gradient: float, row_gradient: float, dynamic: bool) -> list[Any]:
    """By the rules of the adapter: value and row 0 of the table with momentum 0.5, scale, finite, iterations."""
    value, row, speed, row_speed, scale, good = 1.0, 1.0, 0.0, 0.0, 8.0, 0
    trail: list[Any] = []
    for iteration, infinite in enumerate(INFINITE, start=1):
        if not infinite:
            speed, row_speed = 0.5 * speed - 0.5 * gradient, 0.5 * row_speed - 0.5 * row_gradient
            value, row = value + speed, row + row_speed
        if dynamic:
            good = 0 if infinite else good + 1
            if infinite or good == 2:
                scale, good = scale / 2 if infinite else scale * 2, 0
        trail.append(([value, value], [row, 1.0, 1.0], scale, not infinite, iteration))
    return trail


KERAS_2, KERAS_3 = pytest.mark.only_keras("2"), pytest.mark.only_keras("3")


@pytest.mark.parametrize(
    ("kind", "place", "dynamic", "style", "graph"),
    [
        ("new", "inner", True, UNSCALED, True),
        ("new", "inner", False, UNSCALED, False),
        ("new", "outer", True, UNSCALED, True),
        ("new", "nowhere", True, "by hand", True),
        pytest.param("legacy", "inner", True, UNSCALED, True, marks=KERAS_2),
        pytest.param("legacy", "outer", True, UNSCALED, False, marks=KERAS_2),
        # Keras 2 scales losses by get_scaled_loss only.
        pytest.param("new", "inner", True, "scale_loss", True, marks=KERAS_3),
        pytest.param("new", "outer", True, "scale_loss", True, marks=KERAS_3),
        *(
            pytest.param("Keras", place, True, UNSCALED, place == "inner", marks=KERAS_2)
            for place in PLACES
        ),
        *(
            pytest.param("Keras legacy", place, True, UNSCALED, place == "outer", marks=KERAS_2)
            for place in PLACES
        ),
        *(
            pytest.param("Keras", place, True, "scale_loss", place == "outer", marks=KERAS_3)
            for place in PLACES
        ),
        pytest.param("Keras", "inner, late", True, "scale_loss", False, marks=KERAS_3),
    ],
)
def test_ranks_agree_and_steps_follow_the_rules(
    keras_ranks: Pool, kind: str, place: str, dynamic: bool, style: str, graph: bool
) -> None:
    n = keras_ranks.size
    expected = [
        row[:3] if "Keras" in kind else row for row in _expected(n * (n + 1) / 2, 2.0 * n, dynamic)
    ]
    assert keras_ranks.run(body_steps, kind, place, dynamic, style, graph) == [expected] * n


def test_gradients_that_nobody_reduces(keras_two_ranks: Pool) -> None:
    for rank, trail in enumerate(
        keras_two_ranks.run(body_steps, "new", "nowhere", False, UNSCALED, True)
    ):
        assert trail == _expected(rank + 1.0, 2.0, dynamic=False), (
            "each goes its own way, and all leave out one step"
        )


@pytest.mark.parametrize("strategy", ["OneDeviceStrategy", "MirroredStrategy"])
def test_in_a_strategy_of_tensorflow(keras_two_ranks: Pool, strategy: str) -> None:
    assert keras_two_ranks.run(body_strategy, strategy) == [_expected(3.0, 4.0, dynamic=True)] * 2


def body_config(directory: str) -> list[str]:
    kind, sgd = npu.train.optimizer.NpuLossScaleOptimizer, tf.keras.optimizers.SGD
    fixed = kind(tf.keras.optimizers.Adam(0.25), dynamic=False, initial_scale=1000.0)
    again = kind.from_config(fixed.get_config())
    assert (again.get_config(), float(again.loss_scale), again.dynamic) == (
        fixed.get_config(),
        1000.0,
        False,
    )
    for dynamic in (True, False):
        weight, scaled = tf.Variable([1.0], dtype=tf.float16), tf.constant([2.0**15], tf.float16)
        large = kind(sgd(1.0), dynamic, 2.0**17)  # infinite in float16
        large.apply_gradients(zip(large.get_unscaled_gradients([scaled]), [weight]))
        assert weight.numpy() == [0.75]
    model = tf.keras.Sequential([tf.keras.Input([2]), tf.keras.layers.Dense(1)])
    model.compile(
        optimizer=kind(tf.keras.optimizers.Adam(0.25), dynamic_growth_steps=7), loss="mse"
    )
    model.fit(np.ones([4, 2], np.float32), np.ones([4, 1], np.float32), verbose=0)
    path = f"{directory}/model{npu.distribute.rank()}.keras"
    model.save(path)
    loaded = tf.keras.models.load_model(
        path, custom_objects={"NpuLossScaleOptimizer": kind}
    ).optimizer
    assert isinstance(loaded, kind) and loaded.dynamic_growth_steps == 7
    assert float(np.asarray(loaded.inner_optimizer.learning_rate)) == 0.25
    rule = tf.compat.v1.mixed_precision.DynamicLossScale(initial_loss_scale=4.0, increment_period=3)
    constant = tf.compat.v1.mixed_precision.FixedLossScale(16.0)
    older = npu.train.optimizer.NpuExperimentalLossScaleOptimizer
    found = [older(sgd(), scale) for scale in ("dynamic", 128.0, rule, constant)]
    scales = [(optimizer.dynamic, float(optimizer.loss_scale)) for optimizer in found]
    assert scales == [(True, 2.0**15), (False, 128.0), (True, 4.0), (False, 16.0)]
    assert found[2].dynamic_growth_steps == 3
    return wrong_refusals(
        ("ValueError", "", functools.partial(kind, sgd(), dynamic=False)),
        (
            "ValueError",
            "",
            functools.partial(
                kind, sgd(), dynamic=False, initial_scale=2.0, dynamic_growth_steps=5
            ),
        ),
        ("TypeError", "", kind, sgd(), "dynamic"),
        ("TypeError", "", kind, object()),
        ("TypeError", "", kind, kind(sgd())),
    )


def test_configs_models_and_refusals(keras_two_ranks: Pool, tmp_path: Any) -> None:
    assert keras_two_ranks.run(body_config, str(tmp_path)) == [[]] * 2
