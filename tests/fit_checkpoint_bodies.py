"""Bodies and scripts of ``test_fit_checkpoint.py``: a small model that ``fit`` trains, with shuffling and dropout."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from checkpoint_bodies import random_generators
from heard import warnings_of_package

import npu_device as npu
from npu_device._src import compat
from npu_device.distribute import hccl

EPOCHS, SAMPLES, BATCH = 3, 26, 6
STEPS = 5  # of an epoch


class Interrupted(Exception):
    """Ends a fit in the midst of its work."""


def make_model(seed: int, wrapped: bool, **options: Any) -> Any:
    """A compiled model that its first batch builds."""
    keras = tf.keras
    keras.utils.set_random_seed(seed)
    with random_generators():
        model = keras.Sequential(
            [
                keras.layers.Dense(6, activation="relu"),
                keras.layers.BatchNormalization(),
                keras.layers.Dropout(0.5),
                keras.layers.Dense(2),
            ]
        )
    optimizer = keras.optimizers.Adam(0.01)
    if wrapped:
        optimizer = npu.distribute.npu_distributed_keras_optimizer_wrapper(optimizer)
    model.compile(optimizer, "mse", **{"metrics": ["mae"], **options})
    return model if wrapped else npu.distribute.replicate(model)


def make_data(kind: str, seed: int | None) -> dict[str, Any]:
    """The arguments of ``fit`` for its data."""
    x = np.random.default_rng(5).standard_normal([SAMPLES, 4]).astype(np.float32)
    y = x[:, :2] * x[:, 2:]
    whole = tf.data.Dataset.from_tensor_slices((x, y))
    rank, size = npu.distribute.rank(), npu.distribute.size()
    if kind == "arrays":
        return {"x": x, "y": y, "batch_size": BATCH, "validation_split": 0.2}
    if kind == "repeated":
        return {"x": whole.shuffle(SAMPLES, seed).repeat().batch(BATCH), "steps_per_epoch": STEPS}
    if kind == "generator":
        return {"x": _Batches(x, y)}
    if kind == "divided":
        return {"x": npu.distribute.divided(whole.shard(size, rank).shuffle(SAMPLES, seed).batch(BATCH // size))}
    if kind == "pipeline":
        return {"x": npu.distribute.pipeline(whole.shuffle(SAMPLES, seed), lambda x, y: (x, y), BATCH)}
    if kind == "own":
        return {"x": whole.shard(size, rank).take(SAMPLES // size).shuffle(SAMPLES, seed).batch(BATCH // size)}
    return {"x": whole.shuffle(SAMPLES, seed).batch(BATCH)}


class _Batches(getattr(tf.keras.utils, "PyDataset", tf.keras.utils.Sequence)):  # type: ignore[misc]
    def __init__(self, x: Any, y: Any) -> None:
        super().__init__()
        self._batches = [(x[at : at + BATCH], y[at : at + BATCH]) for at in range(0, SAMPLES, BATCH)]

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, index: int) -> Any:
        return self._batches[index]


class Watch(tf.keras.callbacks.Callback):
    """Keep the logs by epoch, and do something after a number of steps with logs: all but those
    that are passed over before the last of them.
    """

    def __init__(self, after: int = 0, action: Any = None) -> None:
        super().__init__()
        self.logs: dict[int, dict[str, float]] = {}
        self._left = after
        self._action = action

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._left -= bool(logs)
        if self._left == 0 and logs:
            self._action()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.logs[epoch] = {name: float(value) for name, value in logs.items()}


def fit(
    directory: str,
    kind: str,
    *,
    watch: Watch | None = None,
    seed: int | None = 3,
    epochs: int = EPOCHS,
    compiled: Any = None,
    **options: Any,
) -> dict[str, Any]:
    """One run of a script."""
    watch = watch or Watch()
    model = make_model(3 if seed is None else seed, wrapped=kind == "own", **(compiled or {}))
    if seed is None:
        tf.random.set_seed(None)
    checkpoint = npu.train.FitCheckpoint(directory, **options)
    slower = tf.keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.9)
    callbacks = [slower, checkpoint, watch]
    if kind == "own":
        callbacks.insert(0, hccl.npu_callbacks_append()[0])
    with warnings_of_package() as texts:
        model.fit(**make_data(kind, seed), epochs=epochs, verbose=0, callbacks=callbacks)
    state = [np.asarray(variable) for variable in compat.optimizer_variables(model.optimizer, model.weights)]
    values = [*map(np.asarray, model.get_weights()), *state]
    return {"values": values, "logs": watch.logs, "not_kept": checkpoint.not_kept, "warnings": texts}


def stopped(directory: str, kind: str, after: int, **options: Any) -> None:
    """Run a script that ends with an error after a number of steps."""

    def stop() -> None:
        raise Interrupted

    try:
        fit(directory, kind, watch=Watch(after, stop), preemption=False, **options)
    except Interrupted:
        return
    raise AssertionError("nothing has interrupted it")


def fresh(directory: str) -> str:
    """Return a directory that has nothing in it, also if a body is run again."""
    if npu.distribute.is_main():
        shutil.rmtree(directory, ignore_errors=True)
    npu.distribute.barrier()
    return directory


def body_same_bits(directory: str, kind: str) -> dict[str, Any]:
    """Train without a break; with one within an epoch, for a dataset after one; and when all is done.

    After the break the arrays' fit goes on from what an error has left, the others from what the whole one had written
    by then, as if all ranks had been killed.
    """
    place = Path(fresh(directory))
    after = 11 if kind == "dataset" else 8  # steps; the newest checkpoint is of step 10, the second epoch's end, or 6

    def keep() -> None:
        if npu.distribute.is_main():
            shutil.copytree(place / "whole", place / "parts")

    watch = None if kind == "arrays" else Watch(after, keep)
    whole = fit(f"{directory}/whole", kind, watch=watch, every=3, preemption=False)
    if kind == "arrays":
        stopped(f"{directory}/parts", kind, after, every=3)
    parts = fit(f"{directory}/parts", kind, every=3)
    ended = fit(f"{directory}/parts", kind, preemption=False) if kind == "arrays" else None
    return {"whole": whole, "parts": parts, "ended": ended}


def body_other_data(directory: str, kind: str, seed: int | None) -> dict[str, Any]:
    fit(fresh(directory), kind, seed=seed, preemption=False, epochs=2)
    return fit(directory, kind, seed=seed, preemption=False)


def body_compiled(directory: str) -> dict[str, Any]:
    """Resume fits that were killed after their first epoch: with several steps per execution, that don't divide an
    epoch's; with metrics in another order, and with others.
    """
    place = Path(fresh(directory))

    def keep() -> None:
        if npu.distribute.is_main():
            shutil.copytree(place / "whole", place / "parts")

    several = {"steps_per_execution": 3, "metrics": ["mae", "mape"]}
    options: dict[str, Any] = {"preemption": False, "every": 3}
    whole = fit(f"{directory}/whole", "dataset", compiled=several, watch=Watch(3, keep), **options)
    other = {**several, "metrics": ["mape", "mae"]}
    parts = fit(f"{directory}/parts", "dataset", compiled=other, **options)
    try:
        fit(f"{directory}/parts", "dataset", **options)
        error = ""
    except npu.train.CheckpointError as found:
        error = str(found)
    return {"whole": whole, "parts": parts, "error": error, "there": sorted(os.listdir(place / "whole"))}


def body_errors(directory: str) -> list[str]:
    stopped(f"{fresh(directory)}/fit", "dataset", 8, every=3)
    count = tf.Variable(0)
    loop = npu.train.JobCheckpoint(f"{directory}/loop", preemption=False, count=count)
    loop.restore()
    loop.save(1)
    texts = []
    for place, epochs in [("loop", EPOCHS), ("fit", 1)]:
        try:
            fit(f"{directory}/{place}", "dataset", epochs=epochs, preemption=False)
        except npu.train.CheckpointError as error:
            texts.append(str(error))
    return texts


def main() -> None:
    """Run a whole job, and then a training that nothing interrupts.

    Arguments: a directory, the kind of data, and for each rank the steps after which it gets a signal, 0 for none, with
    the signal's number: "8:9,1:15" is SIGKILL after eight steps, and SIGTERM one step after the restart.
    """
    directory, kind, *signals = sys.argv[1:]
    npu.open().as_default()
    rank = npu.distribute.rank()
    attempts = signals[rank].split(",") if signals else ["0:0"]
    after, number = map(int, attempts[int(os.environ.get("NPU_DEVICE_RESTART_COUNT", "0"))].split(":"))
    watch = Watch(after, lambda: os.kill(os.getpid(), signal.Signals(number)))
    result = fit(f"{directory}/checkpoints", kind, watch=watch, every=3)
    assert not result["not_kept"]
    whole = fit(f"{directory}/whole", kind, preemption=False)
    for name, one in (("", result), ("whole", whole)):
        with Path(directory, f"{name}{rank}.npz").open("wb") as file:
            np.savez(file, *one["values"], epochs=list(one["logs"]))
