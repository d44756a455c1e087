"""``npu.distribute.all_gather``, and ``all_reduce`` in the step of a replicated model: the gradient of one process."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from compared import compare
from fit_models import make_optimizer, outcome, samples
from pool import Pool

import npu_device as npu

SAMPLES = 37
"""In batches of 9: uneven shares; the last batch has one sample."""


def body_fit(kind: str) -> Any:
    keras = tf.keras
    keras.utils.set_random_seed(7 + npu.distribute.rank())
    gather, reduce = npu.distribute.all_gather, npu.distribute.all_reduce
    x, y = samples(SAMPLES)
    accumulates = kind == "accumulation"

    def contrast(mine: Any, all_ranks: Any) -> Any:
        distances = tf.reduce_sum((mine[:, None] - all_ranks[None]) ** 2, axis=-1)
        return tf.reduce_mean(tf.sqrt(distances + 0.1), axis=1)

    class Model(keras.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.dense = keras.layers.Dense(3, activation="tanh")
            if accumulates:
                self.sums = [
                    self.add_weight(name=f"sum{place}", shape=shape, trainable=False, initializer="zeros")
                    for place, shape in enumerate([(6, 3), (3,)])
                ]
                self.step = self.add_weight(name="step", shape=(), trainable=False, initializer="zeros")

        def call(self, x: Any) -> Any:
            return self.dense(x)

    class OwnStep(Model):
        def train_step(self, data: Any) -> Any:
            x, y = data
            with tf.GradientTape() as tape:
                out = self(x, training=True)
                if kind == "of all samples":
                    loss = tf.reduce_mean(contrast(gather(out), gather(out)))
                elif kind == "of own samples":
                    loss = tf.reduce_mean(contrast(out, gather(out)))
                elif kind == "statistic":
                    loss = (
                        tf.sqrt(reduce(tf.reduce_mean(out[:, 0] ** 2))) + reduce(tf.reduce_sum(out), "sum") ** 2 / 99.0
                    )
                else:
                    each = keras.losses.sparse_categorical_crossentropy(y, out, from_logits=True)
                    loss = tf.reduce_mean(each)
            variables = self.dense.trainable_variables
            gradients = tape.gradient(loss, variables)
            if kind in ("clipping", "eagerly"):
                gradients, _ = tf.clip_by_global_norm(reduce(gradients), 0.1)
            elif kind == "penalty":
                gradients = reduce(gradients)
                gradients = [one + 0.01 * tf.sign(one) * tf.norm(one) for one in gradients]
            elif kind == "mixture":  # has to be reduced once more
                gradients = [one + 0.5 * own for one, own in zip(reduce(gradients), gradients)]
            if accumulates:
                for total, one in zip(self.sums, reduce(gradients)):
                    total.assign(total + one)
                self.step.assign_add(1.0)
                factor = tf.cast(tf.equal(tf.math.floormod(tf.convert_to_tensor(self.step), 2.0), 0.0), tf.float32)
                gradients = [factor * tf.convert_to_tensor(total) for total in self.sums]
                for total in self.sums:
                    total.assign((1.0 - factor) * total)
            self.optimizer.apply_gradients(zip(gradients, variables))
            return {"value": loss}

    loss = None
    model: Any = OwnStep()
    if kind == "compiled":
        model = Model()
        loss = lambda y, out: contrast(out, gather(out))  # noqa: E731
    model.compile(make_optimizer("sgd"), loss, run_eagerly=kind == "eagerly")
    model = npu.distribute.replicate(model)
    return outcome(model, model.fit(x, y, batch_size=9, epochs=2, verbose=0, shuffle=False))


KINDS = ("of own samples", "of all samples", "statistic", "compiled", "clipping", "eagerly", "penalty", "mixture")


@pytest.mark.parametrize("kind", [*KINDS, "accumulation"])
def test_in_a_step(several_keras_ranks: Pool, keras_single: Pool, kind: str) -> None:
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
    whole = np.concatenate(parts)
    return [[value.numpy() for value in way()] for way in (gradient, tf.function(gradient))], whole


def test_in_a_loop(several_keras_ranks: Pool) -> None:
    for found, whole in several_keras_ranks.run(body_outside):
        for everything, gradient in found:
            np.testing.assert_array_equal(everything, 2 * whole)
            np.testing.assert_allclose(gradient, np.sum(3 * (2 * whole) ** 2 * whole), rtol=1e-6)
