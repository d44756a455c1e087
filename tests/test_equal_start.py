"""The first step: ranks that begin with different variables get rank 0's, and are told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import job
import numpy as np
import pytest
import tensorflow as tf
from compared import same_bits
from fit_models import descend
from heard import error_of, hears, settings
from pool import Pool

import npu_device as npu


@hears
def body_first_step(
    said: list[str], mode: str, graph: bool, by_hand: bool = False, built: tuple[int, ...] = (0, 1, 2)
) -> Any:
    """Return the values before and after two steps, and the warnings. Ranks that aren't ``built`` leave that to the
    first step.
    """
    keras = tf.keras
    keras.utils.set_random_seed(npu.distribute.rank())
    model = keras.Sequential([keras.layers.Dense(600, name="wide"), keras.layers.Dense(1)])
    if npu.distribute.rank() in built:
        model.build([None, 600])
    initial = [np.asarray(value) for value in model.get_weights()] if model.built else []
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    reduced = npu.distribute.all_reduce if by_hand else list
    if not by_hand:
        optimizer = npu.distribute.npu_distributed_keras_optimizer_wrapper(optimizer)

    def step() -> None:
        descend(model, lambda: tf.reduce_sum(model(tf.ones([2, 600]))), optimizer, reduced)

    call = tf.function(step) if graph else step
    with settings(NPU_DEVICE_UNEQUAL_START=mode):
        if error := error_of(lambda: [call(), call()]):
            return error, [], said
    return initial, model.get_weights(), said


@pytest.mark.parametrize("built", [(0, 1, 2), ()], ids=["built", "built in the step"])
@pytest.mark.parametrize(
    "graph, by_hand", [(False, False), (True, False), (True, True)], ids=["eager", "function", "reduced by hand"]
)
def test_they_become_rank_0s_with_a_warning(
    keras_ranks: Pool, size: int, graph: bool, by_hand: bool, built: tuple[int, ...]
) -> None:
    results = keras_ranks.run(body_first_step, "repair", graph, by_hand, built)
    same_bits(*(weights for _, weights, _ in results))
    said = results[0][2]
    assert len(said) == (1 if size > 1 else 0)
    if size > 1:
        assert "wide" in said[0]
        assert f"rank {size - 1} on host" in said[0]
        assert "npu.distribute.broadcast(model.variables)" in said[0]
        assert not any(quiet for _, _, quiet in results[1:])


def test_an_error_or_nothing_on_request(keras_two_ranks: Pool) -> None:
    for rank, (text, _, _) in enumerate(keras_two_ranks.run(body_first_step, "error", True)):
        assert f"rank {rank}: the ranks begin training with different values of 2 of " in text
    (_, first, said), (_, second, _) = keras_two_ranks.run(body_first_step, "ignore", True)
    assert not np.array_equal(first[0], second[0])
    assert said == []


@pytest.mark.parametrize("by_hand", [False, True], ids=["wrapped", "reduced by hand"])
def test_a_model_that_is_built_on_some_ranks_only(keras_two_ranks: Pool, by_hand: bool) -> None:
    (first, weights, _), (second, others, _) = keras_two_ranks.run(body_first_step, "repair", True, by_hand, (0,))
    if isinstance(first, str):
        for rank, text in enumerate((first, second)):
            assert f"rank {rank}: at the first step the variables of the model or the optimizer have no values" in text
            assert "on rank(s) 1, but" in text
    else:  # tf-keras, which gives them values at once
        same_bits(weights, others)


def body_of_this_rank() -> tuple[list[float], list[float], list[float]]:
    """A variable that belongs to each rank, beside one that all train; and one whose gradients no tape made."""
    rank = npu.open().worker_id
    shared, own, other = (tf.Variable(tf.fill([size], float(rank))) for size in (3, 3, 2))

    @tf.function
    def step() -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(shared * own)
        [reduced] = npu.distribute.all_reduce([tape.gradient(loss, shared)])
        return reduced, npu.distribute.all_reduce([other * 1.0])

    step()
    return shared.numpy().tolist(), own.numpy().tolist(), other.numpy().tolist()


def test_what_may_belong_to_a_rank_is_left_alone(two_ranks: Pool) -> None:
    for rank, found in enumerate(two_ranks.run(body_of_this_rank)):
        assert found == ([rank] * 3, [rank] * 3, [rank] * 2)


@hears
def body_broadcast_of_nothing(said: list[str]) -> list[str]:
    npu.distribute.broadcast([])
    return said


def test_broadcast_of_nothing_says_so(several_ranks: Pool) -> None:
    for rank, said in enumerate(several_ranks.run(body_broadcast_of_nothing)):
        [text] = said
        assert text.startswith(f"rank {rank}: broadcast was given an empty list")
        assert "model.build" in text


FORGOTTEN = """
import npu_device as npu
npu.open().as_default()
import numpy as np
import tensorflow as tf

def main():
    model = tf.keras.Sequential([tf.keras.Input([2]), tf.keras.layers.Dense(1)])
    model.compile(optimizer="sgd", loss="mse")
    {line}
    model.fit(np.ones([8, 2]), np.ones([8, 1]), verbose=0)

main()
"""


def test_ranks_that_train_alone_are_told(tmp_path: Path) -> None:
    together = "".join(job.outputs(tmp_path, 2, FORGOTTEN.format(line="")))
    assert together.count("in this job of 2 ranks: each of them ran by itself") == 1
    assert "npu.distribute.replicate(model)" in together
    line = "model = npu.distribute.replicate(model)"
    first, second = job.outputs(tmp_path, 2, FORGOTTEN.format(line=line), keras="2")
    assert "by itself" not in first + second
    assert "npu_device: Sequential" in first
    assert "global batch   8 samples, 4 per rank; 1 steps per epoch" in first
    assert "learning rate  0.01 (SGD), as given" in first
    assert "global batch" not in second


@hears
def body_another_order_of_reads(said: list[str]) -> tuple[list[float], list[float], list[str]]:
    """Train two weights of one shape. Rank 0 reads the second one first, and one that isn't trained. The steps are
    audited. Return both, and the warnings.
    """
    first, second, average = tf.Variable([1.0, 2.0]), tf.Variable([3.0, 4.0]), tf.Variable([5.0, 6.0])

    @tf.function
    def step() -> None:
        if npu.distribute.rank() == 0:
            for variable in (second, average):
                tf.debugging.assert_all_finite(variable, "a check on rank 0 only")
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(first)) + tf.reduce_sum(tf.square(second))
        gradients = npu.distribute.all_reduce(tape.gradient(loss, [first, second]), "mean")
        for gradient, variable in zip(gradients, (first, second)):
            variable.assign_sub(0.25 * gradient)

    with settings(NPU_DEVICE_AUDIT="2"):
        for _ in range(5):
            step()
    return first.numpy().tolist(), second.numpy().tolist(), said


@pytest.mark.both_backends
def test_weights_that_ranks_read_in_another_order(several_ranks: Pool) -> None:
    halved = [[value / 2**5 for value in values] for values in ([1.0, 2.0], [3.0, 4.0])]
    for first, second, said in several_ranks.run(body_another_order_of_reads):
        assert [first, second] == halved
        assert not any("different" in text or "drift" in text for text in said)


@hears
def body_another_order_of_creation(said: list[str], teacher: bool) -> tuple[list[list[float]], list[str]]:
    """Train two layers of one shape by hand. Rank 0 makes the second one first, or looks at a third one in its steps.
    Return the weights after audited steps, and the warnings.
    """
    x = tf.constant([[1.0, 2.0], [3.0, 4.0]])
    first, second, other = (
        tf.keras.layers.Dense(2, use_bias=False, name=name) for name in ("first", "second", "other")
    )
    if npu.distribute.rank() == 0 and not teacher:
        second(x)
    trained = [layer for layer in (first, second, other) if layer(x) is not None][:2]
    weights = [layer.trainable_variables[0] for layer in trained]
    for number, weight in enumerate(weights):
        weight.assign(tf.fill([2, 2], 1.0 + number))

    @tf.function
    def step(x: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(first(x))) + 2 * tf.reduce_mean(tf.square(second(x)))
        if teacher and npu.distribute.rank() == 0:
            tf.debugging.check_numerics(other(x), "teacher")
        for weight, gradient in zip(weights, npu.distribute.all_reduce(tape.gradient(loss, weights), "mean")):
            weight.assign_sub(0.01 * gradient)

    with settings(NPU_DEVICE_AUDIT="2"):
        for _ in range(5):
            step(x)
    return [tf.reshape(weight, [-1]).numpy().tolist() for weight in weights], said


@pytest.mark.parametrize("teacher", [False, True])
def test_layers_that_ranks_make_in_another_order(keras_two_ranks: Pool, teacher: bool) -> None:
    (weights, said), (others, _) = keras_two_ranks.run(body_another_order_of_creation, teacher)
    assert weights == others
    assert weights[0] != weights[1]
    assert not any("different" in text for text in said)


def body_other_numbers_in_names(fits: bool) -> float:
    """Train a model of which rank 0 has made a throw-away copy before, with an optimizer that has slots."""
    keras = tf.keras

    def model() -> Any:
        return keras.Sequential([keras.Input([4]), *[keras.layers.Dense(4) for _ in range(12)], keras.layers.Dense(1)])

    keras.backend.clear_session()
    keras.utils.set_random_seed(1)
    if npu.distribute.rank() == 0:
        model()  # now automatic names go on with dense_13, which come in another order than dense to dense_12
    keras.utils.set_random_seed(1)
    mine, optimizer = model(), keras.optimizers.Adam(0.01)
    x = np.random.RandomState(0).rand(32, 4).astype("f")
    with settings(NPU_DEVICE_AUDIT="2"):
        if fits:
            mine.compile(optimizer, "mse")
            npu.distribute.replicate(mine).fit(x, x[:, :1], batch_size=8, epochs=2, verbose=0)
        else:
            npu.distribute.npu_distributed_keras_optimizer_wrapper(optimizer)
            for _ in range(5):
                descend(mine, lambda: tf.reduce_mean(tf.square(mine(x))), optimizer)
    return float(sum(tf.reduce_sum(weight) for weight in mine.trainable_variables))


@pytest.mark.parametrize("fits", [False, True])
def test_automatic_names_with_other_numbers(keras_two_ranks: Pool, fits: bool) -> None:
    first, second = keras_two_ranks.run(body_other_numbers_in_names, fits)
    assert first == second
