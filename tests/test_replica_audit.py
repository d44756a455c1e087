"""The replica audit: ranks whose variables have become different are told so, on every rank."""

from __future__ import annotations

import gc
import re
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from caught_messages import error_of, hears, settings
from fit_models import descend
from pool import Pool

import npu_device as npu


@hears
def body_drift(
    said: list[str], how: str, variables: dict[str, str], drifts_at: int, steps: int = 8
) -> Any:
    """Train; after some steps the last rank changes a weight. Return the error and the warnings."""
    keras = tf.keras
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [keras.Input([600]), keras.layers.Dense(600, name="wide"), keras.layers.Dense(1)]
    )
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    reduced = npu.distribute.all_reduce if how == "by hand" else list
    if how != "by hand":
        optimizer = npu.distribute.npu_distributed_keras_optimizer_wrapper(optimizer)
    kernel, made = model.get_layer("wide").kernel, tf.Variable(0)
    rank, last = npu.distribute.rank(), npu.distribute.rank() == npu.distribute.size() - 1

    def step() -> None:
        descend(
            model,
            lambda: tf.reduce_mean(model(tf.fill([2, 600], 1e-3))) * (rank + 1),
            optimizer,
            reduced,
        )
        made.assign_add(1)
        if last:  # in the function too, where the audit must not read it half done
            far = tf.cast(made == drifts_at, tf.float32) * 0.5
            kernel.assign(kernel + far * tf.one_hot(3, 600)[:, None])

    def loop() -> None:
        for _ in tf.range(steps):
            step()

    call = {"loop": tf.function(loop), "eager": step}.get(how, tf.function(step))
    with settings(**variables):
        error = error_of(lambda: [call() for _ in range(1 if how == "loop" else steps)])
    return error, said, int(np.asarray(made))


@pytest.mark.parametrize("how", ["eager", "function", "loop", "by hand"])
def test_drift_is_one_error_on_every_rank(several_keras_ranks: Pool, how: str) -> None:
    size = several_keras_ranks.size
    results = several_keras_ranks.run(body_drift, how, {"NPU_DEVICE_AUDIT": "2"}, 3)
    for rank, (text, said, made) in enumerate(results):
        assert made in (3, 4), text  # in a function, what doesn't depend on the update still runs
        assert (
            f"rank {rank}: the ranks have drifted apart: seen after step 3 (after step 1 they were equal)"
            in text
        )
        assert "in 1 of " in text and "wide/kernel" in text
        lines = dict.fromkeys(
            line for line in text.splitlines() if " norm " in line
        )  # TensorFlow may repeat them
        of_ranks = "".join(lines)
        found = re.findall(
            r"  rank (\d) on host \S+: norm ([\d.]+), digest \w{8} of \S*wide/kernel", of_ranks
        )
        assert [int(one) for one, _ in found] == list(range(size)), lines
        assert found[0][1] != found[-1][1] and len({norm for _, norm in found[:-1]}) == 1, lines
        assert "NPU_DEVICE_AUDIT=1" in text
        assert said == []


def test_a_warning_on_request_or_nothing(keras_two_ranks: Pool) -> None:
    results = keras_two_ranks.run(
        body_drift, "function", {"NPU_DEVICE_AUDIT": "1", "NPU_DEVICE_DRIFT": "warning"}, 3
    )
    assert [(text, made) for text, _, made in results] == [("", 8), ("", 8)]
    [text] = results[0][1]
    assert text.startswith(
        "the ranks have drifted apart: seen after step 3 (after step 2 they were equal)"
    )
    assert text.endswith("This optimizer is not audited any more.")
    assert results[1][1] == []
    assert (
        keras_two_ranks.run(body_drift, "function", {"NPU_DEVICE_AUDIT": "0"}, 1)
        == [("", [], 8)] * 2
    )


def test_by_default_a_drift_is_found(two_ranks: Pool) -> None:
    """The first audits come in steps 4, 7, 10 and 20."""
    for text, _, _ in two_ranks.run(body_drift, "loop", {}, 2, 12):
        assert "seen after step 3, in 1 of " in text
    for text, _, _ in two_ranks.run(body_drift, "eager", {}, 12, 25):
        assert "seen after step 19 (after step 9 they were equal), in 1 of " in text


def body_functions_made_again() -> str:
    """Train with a new function for each step; the last rank changes its weight after the fourth. Rank 0 forgets old
    functions at once, the others never do. Return the error.
    """
    weight = tf.Variable([1.0, 2.0])

    def train() -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(weight))
        [gradient] = npu.distribute.all_reduce(tape.gradient(loss, [weight]), "mean")
        weight.assign_sub(0.01 * gradient)

    def loop() -> None:
        for number in range(8):
            tf.function(train)()
            if npu.distribute.rank() == 0:
                gc.collect()
            if number == 3 and npu.distribute.rank() == npu.distribute.size() - 1:
                weight.assign_add([0.0, 1.0])

    gc.disable()
    with settings(NPU_DEVICE_AUDIT="3"):
        error = error_of(loop)
    gc.enable()
    return error


def test_audits_do_not_depend_on_when_a_rank_forgets_old_functions(two_ranks: Pool) -> None:
    for text in two_ranks.run(body_functions_made_again):
        assert "drifted apart: seen after step 5 (after step 2 they were equal)" in text


def body_not_finite(how: str, value: float) -> Any:
    """Train; the last rank's loss is NaN or infinite at the third step. Return the error and the weights."""
    keras = tf.keras
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [keras.Input([4]), keras.layers.Dense(3, name="hidden"), keras.layers.Dense(1)]
    )
    options = {"gradient_accumulation_steps": 2} if how == "accumulated" else {}
    optimizer = npu.distribute.DistributedOptimizer(keras.optimizers.SGD(0.1, **options))
    if how == "loss scale":
        optimizer = npu.train.optimizer.NpuLossScaleOptimizer(optimizer)
    x = np.full([12, 2, 4], 1.0 + npu.distribute.rank(), np.float32)
    if npu.distribute.rank() == npu.distribute.size() - 1:
        x[2, 1, 3] = value  # the third batch

    def step(batch: Any) -> None:
        descend(model, lambda: tf.reduce_mean(model(batch)), optimizer)

    def train() -> Any:
        if how == "fit":
            model.compile(optimizer, "mse", run_eagerly=False)
            return model.fit(
                x.reshape([24, 4]), np.ones([24, 1]), batch_size=2, shuffle=False, verbose=0
            )
        call = step if how == "eager" else tf.function(step)
        for batch in x[:5]:
            call(tf.constant(batch))
        return None

    with settings(NPU_DEVICE_CHECK_GRADIENTS="on"):
        return error_of(train), model.get_weights()


@pytest.mark.parametrize(
    ("how", "value"),
    [
        ("eager", "nan"),
        ("function", "inf"),
        ("fit", "nan"),
        ("loss scale", "inf"),
        pytest.param("accumulated", "nan", marks=pytest.mark.only_keras("3")),
    ],
)
def test_gradients_that_are_not_finite_are_told_with_rank_and_variable(
    several_keras_ranks: Pool, how: str, value: str
) -> None:
    last = several_keras_ranks.size - 1
    for rank, (text, weights) in enumerate(
        several_keras_ranks.run(body_not_finite, how, float(value))
    ):
        assert all(np.isfinite(weight).all() for weight in weights)
        if how == "loss scale":  # it skips them itself
            assert text == ""
            continue
        assert f"rank {rank}: the gradients of step 3 are not finite" in text
        assert f"  rank {last} on host " in text
        assert f"hidden/kernel ({'NaN' if value == 'nan' else 'infinite'})" in text.replace(
            ":0", ""
        )
        assert last == 1 or "  rank 0 on host" not in text
        assert "loss-scale optimizer" in text
