"""The broadcasting callback, in ``fit``, under either Keras."""

from __future__ import annotations

from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from callback_bodies import body_resume, body_uncallable, body_warned
from pool import Pool

import npu_device as npu


def body_fit(built: bool) -> Any:
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


@pytest.mark.parametrize("built", [True, False], ids=["built", "built by its first step"])
def test_broadcasts_once_at_the_first_batch(keras_ranks: Pool, built: bool) -> None:
    results = keras_ranks.run(body_fit, built)
    root = results[-1]
    for rank, (initial, after_first, later) in enumerate(results):
        np.testing.assert_array_equal(
            after_first[0], root[not built][0], err_msg="learning rate 0: the weights are the root's initial ones"
        )
        np.testing.assert_allclose(
            later, root[1][0] + rank, rtol=1e-6, err_msg="the second fit must not broadcast again"
        )
        if built and rank < len(results) - 1:
            assert not np.array_equal(initial[0], root[0][0])


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


# The model, its optimizer, and the ranks on which the model is built before fit.
ON_1_2_AND_3_RANKS = ["functional-adam-nowhere", "subclass-ema-fresh", "gan-adam-root"]
ON_2_RANKS = [
    "functional-scaled-nowhere",
    "functional-ema-root",
    "functional-legacy-nowhere",
    "functional-legacy_scaled-nowhere",
    "sequential-adam-nowhere",
    "sequential-legacy-root",
    "subclass-adam-nowhere",
    "subclass-scaled-root",
    "own_step-ema-everywhere",
    "own_step-legacy-root",
    "own_step-adam-fresh",
    "gan-adam-fresh",
    "untraceable-adam-everywhere",
    "untraceable-adam-fresh",
]
ONLY_KERAS_2 = [  # Keras 3 has no legacy optimizers, and restores no checkpoint into a model that isn't built
    case for case in ON_2_RANKS if "legacy" in case or case == "subclass-adam-nowhere"
]
RUNS = [
    (size, keras, case)
    for size in (1, 2, 3)
    for keras in ("2", "3")
    for case in ON_1_2_AND_3_RANKS + ON_2_RANKS
    if (size == 2 or case in ON_1_2_AND_3_RANKS) and (keras == "2" or case not in ONLY_KERAS_2)
]


@pytest.mark.parametrize(("size", "keras", "case"), RUNS, indirect=["size", "keras"])
def test_training_goes_on_from_the_checkpoint_of_the_root_as_in_one_process(
    keras_ranks: Pool, tmp_path: Path, case: str
) -> None:
    results = keras_ranks.run(body_resume, str(tmp_path), *case.split("-"))
    of_root, expected, _ = results[0]
    assert len(expected) > 4
    for own, of_one_process in zip_longest(of_root, expected):
        np.testing.assert_allclose(own, of_one_process, rtol=2e-4, atol=2e-6, err_msg="one process")
    for rank, (after, _, warnings) in enumerate(results):
        assert not warnings
        for own, of_rank_0 in zip_longest(after, of_root):
            np.testing.assert_array_equal(own, of_rank_0, err_msg=f"rank {rank} and rank 0")


def test_a_model_that_cant_be_built_before_its_first_step(keras_two_ranks: Pool) -> None:
    for error in keras_two_ranks.run(body_uncallable):
        assert "What to do: build the model before fit, on every rank" in error


@pytest.mark.parametrize("case", ["sharded", "eager_steps"])
def test_what_cant_be_sent_before_the_first_step_is_said(keras_two_ranks: Pool, case: str) -> None:
    part = {"sharded": "the optimizers of the ranks have different variables", "eager_steps": "in the first 2 steps"}[
        case
    ]
    for warnings in keras_two_ranks.run(body_warned, case):
        assert len(warnings) == 1
        assert part in warnings[0]
        assert "What to do: " in warnings[0]
