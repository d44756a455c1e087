"""``npu.distribute.all_gather``, and ``all_reduce`` in the step of a replicated model: the gradient of one process. A
step that ends with its dataset: ``next`` in the ``tf.function``, and the end as an error of the step.
"""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from fit_models import descend, make_optimizer, outcome, samples
from pool import Pool
from rank_comparison import compare

import npu_device as npu

SAMPLES = 37  # in batches of 9: uneven shares; the last batch has one sample


def body_fit(kind: str) -> Any:
    keras = tf.keras
    keras.utils.set_random_seed(7 + npu.distribute.rank())
    gather, reduce = npu.distribute.all_gather, npu.distribute.all_reduce
    sums = [tf.Variable(tf.zeros(shape), trainable=False) for shape in ([6, 3], [3])]
    number = tf.Variable(0.0, trainable=False)

    def contrast(mine: Any, all_ranks: Any) -> Any:
        distances = tf.reduce_sum((mine[:, None] - all_ranks[None]) ** 2, axis=-1)
        return tf.reduce_mean(tf.sqrt(distances + 0.1), axis=1)

    def loss_of(y: Any, out: Any) -> Any:
        if kind == "of own samples":
            return tf.reduce_mean(contrast(out, gather(out)))
        if kind == "of all samples":
            statistic = (
                tf.sqrt(reduce(tf.reduce_mean(out[:, 0] ** 2)))
                + reduce(tf.reduce_sum(out), "sum") ** 2 / 99.0
            )
            return tf.reduce_mean(contrast(gather(out), gather(out))) + statistic
        return tf.reduce_mean(
            keras.losses.sparse_categorical_crossentropy(y, out, from_logits=True)
        )

    def changed(gradients: Any) -> Any:
        if kind == "eagerly":
            return tf.clip_by_global_norm(reduce(gradients), 0.1)[0]
        if kind == "penalty":
            return [one + 0.01 * tf.sign(one) * tf.norm(one) for one in reduce(gradients)]
        if kind == "mixture":  # has to be reduced once more
            return [one + 0.5 * own for one, own in zip(reduce(gradients), gradients)]
        if kind == "accumulation":
            for total, one in zip(sums, reduce(gradients)):
                total.assign_add(one)
            number.assign_add(1.0)
            factor = tf.cast(number % 2.0 == 0.0, tf.float32)
            gradients = [factor * total for total in sums]
            for total in sums:
                total.assign((1.0 - factor) * total)
        return gradients

    class OwnStep(keras.Model):  # type: ignore[misc]
        def train_step(self, data: Any) -> Any:
            x, y = data
            return {
                "value": descend(self, lambda: loss_of(y, self(x, training=True)), reduced=changed)
            }

    inputs = keras.Input([6])
    is_compiled = kind == "compiled"
    model = (keras.Model if is_compiled else OwnStep)(
        inputs, keras.layers.Dense(3, activation="tanh")(inputs)
    )
    loss = (lambda y, out: contrast(out, gather(out))) if is_compiled else None
    model.compile(make_optimizer("sgd"), loss, run_eagerly=kind == "eagerly")
    x, y = samples(SAMPLES)
    model = npu.distribute.replicate(model)
    return outcome(model, model.fit(x, y, batch_size=9, epochs=2, verbose=0, shuffle=False))


@pytest.mark.parametrize(
    "kind",
    [
        "of own samples",
        "of all samples",
        "compiled",
        "eagerly",
        pytest.param("penalty", marks=pytest.mark.full),
        "mixture",
        "accumulation",
    ],
)
def test_gathering_in_a_step_trains_as_one_process(
    several_keras_ranks: Pool, keras_single: Pool, kind: str
) -> None:
    compare(several_keras_ranks, keras_single, body_fit, kind)


def body_outside() -> Any:
    """Return what a loop of one's own gathers, and the mean over the ranks of its gradient."""
    rank, size = npu.distribute.rank(), npu.distribute.size()
    parts = [np.arange(2 * count, dtype=np.float32).reshape(count, 2) + 1 for count in range(size)]
    factor = tf.Variable(2.0)

    def gradient() -> Any:
        with tf.GradientTape() as tape:
            everything = npu.distribute.all_gather(factor * parts[rank])
            loss = tf.reduce_sum(everything**3)
        return everything, npu.distribute.all_reduce(tape.gradient(loss, factor))

    with pytest.raises(ValueError, match=f"rank {rank}: all_gather was given a scalar"):
        npu.distribute.all_gather(1.0)
    with pytest.raises(TypeError, match=f"rank {rank}: all_gather was given a dict"):
        npu.distribute.all_gather({"a": tf.ones([2])})
    whole = np.concatenate(parts)
    return [[value.numpy() for value in way()] for way in (gradient, tf.function(gradient))], whole


def test_gathering_in_a_loop_has_the_gradient_of_each_rank(several_keras_ranks: Pool) -> None:
    for found, whole in several_keras_ranks.run(body_outside):
        for everything, gradient in found:
            np.testing.assert_array_equal(everything, 2 * whole)
            np.testing.assert_allclose(gradient, np.sum(3 * (2 * whole) ** 2 * whole), rtol=1e-6)


EPOCHS = 40


def body_ends(kind: str) -> list[float]:
    npu.open()
    variable = tf.Variable(tf.zeros([1000]))

    def compute(batch: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(variable * batch)
        [gradient] = npu.distribute.all_reduce(tape.gradient(loss, [variable]), "sum")
        variable.assign_add(gradient)
        return npu.distribute.all_reduce(tf.constant(1.0), "sum")  # rests on no data

    inner = tf.function(compute)

    @tf.function
    def step(iterator: tf.data.Iterator) -> tf.Tensor:
        if kind == "computed in a function":
            return inner(next(iterator))
        if kind == "in a loop":
            total = 0.0
            for _ in tf.range(2):
                total += compute(next(iterator))
            return total
        return compute(next(iterator))

    data = tf.data.Dataset.from_tensors(tf.ones([])).repeat(2)
    for _ in range(EPOCHS):
        iterator = iter(data)
        with contextlib.suppress(tf.errors.OutOfRangeError):
            while True:
                step(iterator)
    return variable.numpy()[:2].tolist()


@pytest.mark.both_engines
@pytest.mark.parametrize("kind", ["plain", "computed in a function", "in a loop"])
def test_every_end_of_the_data(several_ranks: Pool, kind: str) -> None:
    size = several_ranks.size
    assert several_ranks.run(body_ends, kind, timeout=120) == [[EPOCHS * 2.0 * size] * 2] * size
