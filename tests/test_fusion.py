"""``fusion=2``: the tensors of a call travel together, and in a session those of calls that wait at the same time."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import job
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


def body_dependent() -> dict[str, Any]:
    import tensorflow as tf

    import npu_device as npu

    number = tf.constant(float(npu.open().worker_id + 1))
    variable = tf.Variable(0.0)

    def all_reduce(value: Any) -> Any:
        return npu.distribute.all_reduce(value, "sum", fusion=2, fusion_id=0)

    @tf.function
    def on_the_result(number: Any) -> Any:
        first = all_reduce(number)
        return first, all_reduce(first * number), all_reduce(first + number)

    @tf.function
    def on_a_variable(number: Any) -> Any:
        first = all_reduce(number)
        variable.assign(first)
        return first, all_reduce(variable * number), all_reduce(number)

    @tf.function
    def on_an_effect(number: Any) -> Any:
        first = all_reduce(number)
        with tf.control_dependencies([npu.distribute.all_reduce(first, "sum", fusion=0)]):
            later = number + 1.0
        return first, all_reduce(later), all_reduce(number)

    @tf.function
    def in_a_loop(number: Any) -> Any:
        outside = all_reduce(number)
        for _ in tf.range(3):
            number, outside = all_reduce(number), all_reduce(outside)
        return number, outside, all_reduce(number)

    functions = (on_the_result, on_a_variable, on_an_effect, in_a_loop)
    return {function.python_function.__name__: [float(x) for x in function(number)] for function in functions}


def test_calls_that_need_each_other(two_ranks: Pool) -> None:
    for found in two_ranks.run(body_dependent):
        assert found["on_the_result"] == [3.0, 9.0, 9.0]
        assert found["on_a_variable"] == [3.0, 9.0, 3.0]
        assert found["on_an_effect"] == [3.0, 5.0, 3.0]
        assert found["in_a_loop"] == [12.0, 24.0, 24.0]


def body_gradients() -> list[float]:
    import tensorflow as tf

    import npu_device as npu

    x, y = (tf.Variable(float(npu.open().worker_id + 1)) for _ in range(2))

    @tf.function
    def step() -> Any:
        with tf.GradientTape() as tape:
            first = npu.distribute.all_reduce(x * 1.0, "sum", fusion=2, fusion_id=0)
            second = npu.distribute.all_reduce(y * 1.0, "sum", fusion=2, fusion_id=0)
            loss = x * first + 10.0 * y * second
        return tape.gradient(loss, [x, y])

    return [float(gradient) for gradient in step()]


def test_calls_have_gradients(two_ranks: Pool) -> None:
    for gradients in two_ranks.run(body_gradients):
        # What the product rule says: the sum itself, and the sum of what comes in on both ranks.
        assert gradients == [3.0 + 3.0, 30.0 + 30.0]


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


def body_session() -> tuple[list[int], bool]:
    import numpy as np
    import tensorflow as tf

    import npu_device as npu
    from npu_device._src.collectives import sessions
    from npu_device.distribute import hccl_ops

    lengths: list[int] = []
    run_joined = sessions._run_joined

    def count(waiting: Any) -> None:
        lengths.append(len(waiting))
        run_joined(waiting)

    sessions._run_joined = count
    try:
        right = True
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            values = [tf.fill([3], float(npu.open().worker_id + i)) for i in range(24)]
            sums = [hccl_ops.allreduce(value, "sum", fusion=2, fusion_id=3) for value in values]
            sums += [hccl_ops.allreduce(value, "max", fusion=2, fusion_id=3) for value in values]
            for _ in range(4):
                results = np.array(session.run(sums))[:, 0]
                right &= results.tolist() == [2.0 * i + 1 for i in range(24)] + [i + 1.0 for i in range(24)]
    finally:
        sessions._run_joined = run_joined
    return lengths, right


def test_what_waits_in_a_session_travels_together(two_ranks: Pool) -> None:
    lengths, right = zip(*two_ranks.run(body_session))
    assert right == (True, True)
    assert lengths[0] == lengths[1] and sum(lengths[0]) == 4 * 48
    assert len(lengths[0]) < 4 * 40, "24 of each 48 may travel together"


ONE_THREAD = """
import tensorflow as tf

tf.config.threading.set_inter_op_parallelism_threads(1)
tf.config.threading.set_intra_op_parallelism_threads(1)

import npu_device as npu

npu.open().as_default()
rank = npu.open().worker_id

@tf.function
def step(x):
    ours = []
    for i in range(12):
        ours.append(npu.distribute.all_reduce(x + i, "sum", fusion=2, fusion_id=i % 3))
        ours.append(npu.distribute.all_reduce(x * i, "sum", fusion=0))
        if i % 4 == 3:
            ours.append(npu.distribute.all_reduce(ours[-2] * 2.0, "sum", fusion=2, fusion_id=0))
    return tf.add_n([tf.reduce_sum(one) for one in ours])

print([float(step(tf.fill([1000], float(rank + turn)))) for turn in range(3)])
"""


def test_one_thread_is_enough(tmp_path: Path) -> None:
    def expected(turn: int) -> float:
        total, x = 0.0, 2.0 * turn + 1
        for i in range(12):
            total += (x + 2 * i) + x * i + (4 * (x + 2 * i) if i % 4 == 3 else 0)
        return 1000 * total

    for ended in job.run(tmp_path, 2, ONE_THREAD):
        assert ended.code == 0, ended.output
        assert str([expected(turn) for turn in range(3)]) in ended.output
