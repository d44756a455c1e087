"""``npu_device.testing``: faults at a step, restarts, and trainings on ranks compared with one process; the example."""

from __future__ import annotations

import os
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import job
import numpy as np
import pytest
import tensorflow as tf
from ranks import PYTHONPATH

import npu_device as npu
from npu_device import testing
from npu_device.testing import faults

pytestmark = pytest.mark.xdist_group("testing")

run = partial(testing.run, ranks=2, keras=3, environment={"PYTHONPATH": PYTHONPATH})


def train(steps: int = 4) -> str | None:
    for step in range(1, steps + 1):
        npu.distribute.all_reduce(float(step))
        faults.step_done(step)
    return os.environ.get("NPU_DEVICE_RESTART_COUNT")


def fit() -> None:
    model = tf.keras.Sequential([tf.keras.Input([2]), tf.keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model.fit(
        np.ones([6, 2]),
        np.ones([6, 1]),
        batch_size=2,
        epochs=2,
        verbose=0,
        callbacks=[faults.callback()],
    )


@pytest.mark.parametrize(
    ("body", "fault", "says"),
    [
        (train, faults.kill(1, 2), "rank 1 of 2:\nits process was killed by SIGKILL"),
        (train, faults.leave(0, 2), "rank 1 of 2:\n.*rank 0 on host .* has left the job"),
        (
            train,
            faults.raise_(1, 3, KeyError("mine")),
            "rank 1 of 2:\n.*KeyError: 'mine'.*rank 0 of 2:",
        ),
        (fit, faults.raise_(0, 5), "rank 0 of 2:\n.*RuntimeError: a fault on rank 0 after step 5"),
    ],
    ids=["kill", "leave", "raise_", "in fit"],
)
def test_a_fault_reaches_all(body: Any, fault: Any, says: str) -> None:
    with pytest.raises(testing.RankError, match=f"(?s){says}"):
        run(body, faults=[fault])


def test_faults_that_a_job_survives() -> None:
    assert run(train, faults=[faults.stop(1, 1, seconds=0.5), faults.kill(0, 3)], restarts=1) == [
        "1",
        "1",
    ]


def test_a_fault_that_does_not_happen() -> None:
    with pytest.raises(
        AssertionError, match=r"faults.kill\(rank=1, step=9\) did not happen: rank 1 reached step 4"
    ):
        run(train, faults=[faults.kill(1, 9)])


def same(differing: bool) -> None:
    rank = npu.distribute.rank()
    testing.same_on_all_ranks(
        {"step": 3, "weights": [np.zeros(3), np.full([8], float(rank == 1 and differing))]}
    )


def test_the_same_on_all_ranks() -> None:
    run(same, False)
    says = r"1 of 3 values differ between the ranks: values\['weights'\]\[1\]\n  rank 0: float64\[8\] \[0. 0. 0. 0. …\]"
    with pytest.raises(testing.RankError, match=says):
        run(same, True)


def test_a_process_that_is_no_rank(tmp_path: Path) -> None:
    call = "from npu_device import testing\ntesting.same_on_all_ranks(1)"
    [ended] = job.run(tmp_path, 1, call, TF_USE_LEGACY_KERAS="0")
    assert (
        ended.code == 1
        and "RuntimeError: same_on_all_ranks compares the values of ranks" in ended.output
    )


def make_model(loss: Any = "mse") -> Any:
    layers = tf.keras.layers
    made = [
        tf.keras.Input([3]),
        layers.Dense(4, name="first"),
        layers.BatchNormalization(),
        layers.Dropout(0.5),
    ]
    model = tf.keras.Sequential([*made, layers.Dense(2, name="last")])
    # The score is one number per column.
    metrics = ["mae", tf.keras.metrics.R2Score(class_aggregation=None)]
    model.compile(tf.keras.optimizers.Adam(0.01), loss, metrics=metrics)
    return model


def mixing_loss(y: Any, predicted: Any) -> Any:
    return tf.square(tf.reduce_mean(predicted - y, axis=0, keepdims=True)) + 0 * predicted


NUMBERS = np.random.default_rng(0)


def other_data_each_time() -> tf.data.Dataset:
    x = NUMBERS.normal(size=[24, 3]).astype(np.float32)
    return tf.data.Dataset.from_tensor_slices((x, x[:, :2])).batch(12)


def make_callbacks() -> list[Any]:
    folder = tempfile.mkdtemp()  # another one in each process
    return [
        tf.keras.callbacks.EarlyStopping("loss", patience=0, min_delta=0.2),
        tf.keras.callbacks.ModelCheckpoint(f"{folder}/model.weights.h5", save_weights_only=True),
    ]


def test_a_training_on_ranks_is_that_of_one_process() -> None:
    random = np.random.default_rng(1)
    data = (
        random.normal(size=[24, 3]).astype(np.float32),
        random.normal(size=[24, 2]).astype(np.float32),
    )
    equal = partial(testing.equal_to_one_process, keras=3, environment={"PYTHONPATH": PYTHONPATH})
    equal(make_model, data, ranks=[2], make_callbacks=make_callbacks)
    says = (
        "(?s)2 ranks don't train as one process does.*  loss after epoch 1: off by .*npurun verify"
    )
    with pytest.raises(AssertionError, match=says):
        equal(partial(make_model, mixing_loss), data, ranks=[2], epochs=1)
    # Differences of any size would be rounding.
    says = "(?s)gets different numbers.*What to do: give each random generator a seed"
    with pytest.raises(AssertionError, match=says):
        equal(partial(make_model, mixing_loss), other_data_each_time, ranks=[2], epochs=1)
