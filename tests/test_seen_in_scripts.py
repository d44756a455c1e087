"""Single things that ported scripts in TensorFlow 2 style do, each as a script would do it."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import tensorflow as tf
from pool import Pool

import npu_device as npu


def body_places() -> list[float]:
    rank = npu.open().worker_id
    metric = tf.keras.metrics.Mean()
    metric.update_state(rank + 1.0)
    found = [npu.distribute.all_reduce(np.float32(rank + 1), "sum")]
    found += npu.distribute.all_reduce([metric.result()], "sum")

    def replica() -> Any:
        return npu.distribute.all_reduce(tf.constant(rank + 1.0), "sum")

    for strategy in (tf.distribute.OneDeviceStrategy("CPU:0"), tf.distribute.MirroredStrategy(["CPU:0"])):
        with strategy.scope():
            found.append(strategy.run(replica))
            found.append(tf.function(lambda run=strategy.run: run(replica))())
    thread = threading.Thread(target=lambda: found.append(replica()))
    thread.start()
    thread.join(60)
    return [float(value) for value in found]


def test_wherever_all_reduce_is_called(keras_two_ranks: Pool) -> None:
    assert keras_two_ranks.run(body_places) == [[3.0] * 7] * 2


def body_thrown_away() -> list[float]:
    rank = npu.open().worker_id

    @tf.function
    def step(value: Any) -> Any:
        reduced = npu.distribute.all_reduce([value, value * 2], "sum")
        return reduced[0] if rank else value  # rank 0 looks at none of them

    results = [float(step(tf.constant(rank + 1.0))) for _ in range(3)]
    npu.distribute.all_reduce(tf.constant(1.0))  # nor here
    return [*results, float(npu.distribute.all_reduce(rank + 1.0, "sum"))]


def test_a_result_that_a_rank_throws_away(two_ranks: Pool) -> None:
    assert two_ranks.run(body_thrown_away) == [[1.0, 1.0, 1.0, 3.0], [3.0, 3.0, 3.0, 3.0]]
