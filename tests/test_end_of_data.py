"""A step that ends with its dataset: ``next`` in the ``tf.function``, and the end as an error of the step."""

from __future__ import annotations

import pytest
import tensorflow as tf
from pool import Pool

import npu_device as npu

EPOCHS = 40


def body(kind: str, epochs: int) -> tuple[int, list[float]]:
    npu.open()
    variable = tf.Variable(tf.zeros([1000]))

    def compute(batch: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(variable * tf.cast(batch, tf.float32))
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
    ends = 0
    for _ in range(epochs):
        iterator = iter(data)
        try:
            while True:
                step(iterator)
        except tf.errors.OutOfRangeError:
            ends += 1
    return ends, variable.numpy()[:2].tolist()


@pytest.mark.both_backends
@pytest.mark.parametrize("kind", ["plain", "computed in a function", "in a loop"])
def test_every_end_of_the_data(several_ranks: Pool, kind: str) -> None:
    sums = float(EPOCHS * 2 * several_ranks.size)
    for ends, values in several_ranks.run(body, kind, EPOCHS, timeout=120):
        assert ends == EPOCHS
        assert values == [sums, sums]
