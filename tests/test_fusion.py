"""``fusion=2``: the tensors of a call travel together; each call is a collective of its own."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
from pool import Pool

pytestmark = pytest.mark.both_backends


def body_together() -> dict[str, Any]:
    import tensorflow as tf

    import npu_device as npu
    from npu_device.distribute import hccl_ops

    rank = npu.open().worker_id
    number = tf.constant(float(rank + 1))
    vector = tf.range(3.0) + number
    whole = tf.constant([rank, 7])

    def all_reduce(values: Any, reduction: str = "sum", identity: int = 1) -> Any:
        return npu.distribute.all_reduce(values, reduction, fusion=2, fusion_id=identity)

    @tf.function
    def calls(number: Any, vector: Any, whole: Any) -> Any:
        first = all_reduce([vector, None, whole])
        second = all_reduce(number)
        between = npu.distribute.all_reduce(vector, "sum", fusion=0)
        third = hccl_ops.allreduce(tf.stack([vector, -vector]), "sum", fusion=2, fusion_id=1)
        return first[0], first[2], second, between, third, all_reduce([tf.zeros([0]), number, whole + 1])

    @tf.function
    def different(number: Any) -> Any:
        return all_reduce(number), all_reduce(number, "mean"), all_reduce(number, identity=2), all_reduce(number, "max")

    def outputs(function: Any, *arguments: Any) -> Any:
        return tf.nest.map_structure(lambda tensor: tensor.numpy().tolist(), function(*arguments))

    return {"calls": outputs(calls, number, vector, whole), "different": outputs(different, number)}


def test_calls_with_one_id(two_ranks: Pool) -> None:
    for found in two_ranks.run(body_together):
        first, whole, second, between, third, last = found["calls"]
        assert (first, whole, second, between) == ([3.0, 5.0, 7.0], [1, 14], 3.0, [3.0, 5.0, 7.0])
        assert third == [[3.0, 5.0, 7.0], [-3.0, -5.0, -7.0]]
        assert last == [[], 3.0, [3, 16]]
        assert found["different"] == (3.0, 1.5, 3.0, 2.0)


def body_optimizers() -> list[float]:
    import tensorflow as tf
    import tf_keras

    import npu_device as npu

    rank = npu.open().worker_id
    variables = [tf.Variable(0.0), tf.Variable(0.0)]
    optimizers = [
        npu.distribute.npu_distributed_keras_optimizer_wrapper(
            tf_keras.optimizers.legacy.SGD(1.0), fusion=2, fusion_id=5
        )
        for _ in range(2)
    ]

    @tf.function
    def step() -> None:
        with tf.GradientTape(persistent=True) as tape:
            losses = [(rank + 1.0) * variable * factor for variable, factor in zip(variables, (1.0, 10.0))]
        gradients = [tape.gradient(loss, variable) for loss, variable in zip(losses, variables)]
        for optimizer, gradient, variable in zip(optimizers, gradients, variables):
            optimizer.apply_gradients([(gradient, variable)])

    step()
    return [float(variable) for variable in variables]


def test_two_optimizers_of_one_id(two_ranks: Pool) -> None:
    if importlib.util.find_spec("tf_keras") is None:
        pytest.skip("needs tf-keras")
    assert two_ranks.run(body_optimizers) == [[-1.5, -15.0]] * 2


def body_session() -> list[float]:
    import tensorflow as tf

    import npu_device as npu
    from npu_device.distribute import hccl_ops

    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        values = [tf.fill([3], float(npu.open().worker_id + i)) for i in range(80)]  # more than one order holds
        sums = [hccl_ops.allreduce(value, "sum", fusion=2, fusion_id=3) for value in values]
        return [float(value[0]) for value in session.run(sums)]


def test_many_calls_in_a_session(two_ranks: Pool) -> None:
    assert two_ranks.run(body_session) == [[2.0 * i + 1 for i in range(80)]] * 2
