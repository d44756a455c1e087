"""The broadcasting callback, in ``fit``, under either Keras."""

from __future__ import annotations

from typing import Any

import numpy as np
from pool import Pool


def body_fit(built: bool) -> Any:
    import tensorflow as tf

    import npu_device as npu
    from npu_device.distribute.npu_callbacks import NPUBroadcastGlobalVariablesCallback

    handle = npu.open()
    root = handle.workers_num - 1
    tf.keras.utils.set_random_seed(handle.worker_id)

    class Subclass(tf.keras.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.dense = tf.keras.layers.Dense(3)
            self.norm = tf.keras.layers.BatchNormalization()

        def call(self, x: Any, training: bool = False) -> Any:
            return self.norm(self.dense(x), training=training)

    model = Subclass()
    if built:
        model(tf.ones([1, 2]))
        initial = model.get_weights()
    else:
        initial = []
    model.compile(optimizer=tf.keras.optimizers.SGD(0.0), loss="mse")
    callback = NPUBroadcastGlobalVariablesCallback(root)
    x = np.ones([8, 2], np.float32) * (handle.worker_id + 1)
    model.fit(x, np.ones([8, 3], np.float32), batch_size=8, epochs=1, verbose=0, callbacks=[callback])
    after_first = [np.asarray(value) for value in model.trainable_variables]
    model.trainable_variables[0].assign_add(tf.ones([2, 3]) * handle.worker_id)
    model.fit(x, np.ones([8, 3], np.float32), batch_size=8, epochs=1, verbose=0, callbacks=[callback])
    return initial, after_first, np.asarray(model.trainable_variables[0])


def test_broadcasts_once_at_the_first_batch(keras_ranks: Pool) -> None:
    results = keras_ranks.run(body_fit, True)
    root = results[-1]
    for rank, (initial, after_first, later) in enumerate(results):
        np.testing.assert_array_equal(
            after_first[0], root[0][0], err_msg="learning rate 0: the weights are the root's initial ones"
        )
        np.testing.assert_allclose(
            later, root[1][0] + rank, rtol=1e-6, err_msg="the second fit must not broadcast again"
        )
        if rank < len(results) - 1:
            assert not np.array_equal(initial[0], root[0][0])


def test_a_model_that_is_built_by_its_first_step(keras_ranks: Pool) -> None:
    results = keras_ranks.run(body_fit, False)
    for _, after_first, _ in results:
        np.testing.assert_array_equal(after_first[0], results[-1][1][0])


def body_append() -> Any:
    from npu_device.distribute.hccl import npu_callbacks_append
    from npu_device.distribute.npu_callbacks import NPUBroadcastGlobalVariablesCallback

    mine = ["first"]
    returned = npu_callbacks_append(mine)
    fresh = npu_callbacks_append(("a", "tuple"))
    return returned is mine, len(returned), len(fresh), isinstance(fresh[0], NPUBroadcastGlobalVariablesCallback)


def test_npu_callbacks_append(keras_ranks: Pool) -> None:
    assert set(keras_ranks.run(body_append)) == {(True, 2, 1, True)}


def body_scope() -> Any:
    import tensorflow as tf

    import npu_device as npu
    from npu_device.distribute.npu_callbacks import npu_broadcast_scope_wrapper

    rank = npu.open().worker_id
    strategy = tf.distribute.OneDeviceStrategy("CPU:0")
    same = npu_broadcast_scope_wrapper(strategy) is strategy
    tf.keras.utils.set_random_seed(rank)
    with strategy.scope():
        counter = tf.Variable(float(rank), trainable=False)
        model = tf.keras.Sequential([tf.keras.Input([2]), tf.keras.layers.Dense(3)])
    with strategy.scope():
        later = tf.Variable(float(rank))
    inside = float(strategy.run(lambda: later + 1.0))
    return same, model.get_weights()[0].tolist(), float(counter), float(later), inside


def test_variables_of_a_strategys_scope(keras_two_ranks: Pool) -> None:
    results = keras_two_ranks.run(body_scope)
    for rank, (same, weights, counter, later, inside) in enumerate(results):
        assert same
        assert weights == results[0][1]
        assert (counter, later, inside) == (rank, rank, rank + 1), "nothing but the first trainable ones is sent"
