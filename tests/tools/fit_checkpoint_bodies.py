"""Bodies of ``test_fit_checkpoint.py``: a small model that ``fit`` trains, with shuffling and dropout."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from caught_messages import error_of, settings, warnings_of_package
from checkpoint_bodies import random_generators
from rank_comparison import same_bits

import npu_device as npu
from npu_device._src import compat
from npu_device._src.cluster.roster import parent_and_start
from npu_device.distribute import hccl

EPOCHS, SAMPLES, BATCH = 3, 26, 6
STEPS = 5  # of an epoch
SMALL = 6  # samples of small data


def make_model(seed: int, wrapped: bool, **options: Any) -> Any:
    """A compiled model that its first batch builds."""
    keras = tf.keras
    keras.utils.set_random_seed(seed)
    with random_generators():
        model = keras.Sequential(
            [
                keras.layers.Dropout(0.5),
                keras.layers.BatchNormalization(),
                keras.layers.Dense(2),
            ]
        )
    optimizer = keras.optimizers.Adam(0.01)
    if wrapped:
        optimizer = npu.distribute.npu_distributed_keras_optimizer_wrapper(optimizer)
    model.compile(optimizer, "mse", **{"metrics": ["mae"], **options})
    return model if wrapped else npu.distribute.replicate(model)


def make_data(kind: str, seed: int) -> dict[str, Any]:
    """The arguments of ``fit`` for its data."""
    x = np.random.default_rng(5).standard_normal([SAMPLES, 4]).astype(np.float32)
    y = x[:, :2] * x[:, 2:]
    whole = tf.data.Dataset.from_tensor_slices((x, y))
    rank, size = npu.distribute.rank(), npu.distribute.size()
    if kind == "other order":
        return {"x": whole.shuffle(SAMPLES, seed + rank).batch(BATCH)}
    if kind == "other order later":
        return {"x": _Shuffled(x, y)}
    if kind == "arrays":
        return {"x": x, "y": y, "batch_size": BATCH, "validation_split": 0.2}
    if kind == "repeated":
        return {"x": whole.shuffle(SAMPLES, seed).repeat().batch(BATCH), "steps_per_epoch": STEPS}
    if kind == "split":
        shuffled = whole.shuffle(SAMPLES, seed)
        return {"x": shuffled.skip(6).batch(4), "validation_data": shuffled.take(6).batch(2)}
    if kind == "parts of a pass":
        return {"x": whole.shuffle(SAMPLES, seed).take(20).batch(2), "steps_per_epoch": STEPS}
    if kind == "generator":
        return {"x": _Batches(x, y)}
    if kind == "pipeline":
        return {
            "x": npu.distribute.pipeline(whole.shuffle(SAMPLES, seed), lambda x, y: (x, y), BATCH)
        }
    if kind.startswith("small"):
        # As many steps as there are batches, told to Keras or not.
        steps = {"steps_per_epoch": SMALL} if kind == "small, steps" else {}
        return {"x": whole.take(SMALL).shuffle(SMALL, seed).batch(1), **steps}
    if kind == "own":
        return {
            "x": whole.shard(size, rank)
            .take(SAMPLES // size)
            .shuffle(SAMPLES, seed)
            .batch(BATCH // size)
        }
    return {"x": whole.shuffle(SAMPLES, seed).batch(BATCH)}


class _Batches(getattr(tf.keras.utils, "PyDataset", tf.keras.utils.Sequence)):  # type: ignore[misc]
    def __init__(self, x: Any, y: Any) -> None:
        super().__init__()
        self._batches = [
            (x[at : at + BATCH], y[at : at + BATCH]) for at in range(0, SAMPLES, BATCH)
        ]

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, index: int) -> Any:
        return self._batches[index]


class _Shuffled(_Batches):
    """Batches in another order on each rank from the second epoch on."""

    reads = 0

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        return super().__getitem__(index)

    def on_epoch_end(self) -> None:
        # Keras 3 calls it before the first epoch, too.
        if self.reads >= len(self):
            full = self._batches[:-1]
            np.random.default_rng(npu.distribute.rank()).shuffle(full)
            self._batches[:-1] = full


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
    seed: int = 3,
    epochs: int = EPOCHS,
    compiled: Any = None,
    **options: Any,
) -> dict[str, Any]:
    """One run of a script."""
    watch = watch or Watch()
    model = make_model(seed, wrapped=kind == "own", **(compiled or {}))
    checkpoint = npu.train.FitCheckpoint(directory, **options)
    slower = tf.keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.9)
    callbacks = [slower, checkpoint, watch]
    if isinstance(watch, _Stopping):
        callbacks = [slower, watch, checkpoint]
    if kind == "own":
        callbacks.insert(0, hccl.npu_callbacks_append()[0])
    with warnings_of_package() as texts:
        try:
            model.fit(**make_data(kind, seed), epochs=epochs, verbose=0, callbacks=callbacks)
        finally:
            checkpoint._job.close()  # a process that is asked to stop would end soon
    state = [
        np.asarray(variable)
        for variable in compat.optimizer_variables(model.optimizer, model.weights)
    ]
    values = [*map(np.asarray, model.get_weights()), *state]
    return {
        "values": values,
        "epochs": model.history.epoch,
        "logs": watch.logs,
        "not_kept": checkpoint.not_kept,
        "warnings": texts,
    }


def fresh(directory: str) -> Path:
    """Return a directory that has nothing in it, also if a body is run again."""
    if npu.distribute.is_main():
        shutil.rmtree(directory, ignore_errors=True)
    npu.distribute.barrier()
    return Path(directory)


def copy(place: Path, name: str) -> None:
    """Keep what a fit has written by now, as if all ranks had been killed."""
    if npu.distribute.is_main():
        shutil.copytree(place / "whole", place / name)


def body_same_bits(directory: str, kind: str) -> dict[str, Any]:
    """Train without a break; with one within an epoch, for a dataset after one; and when all is done.

    The fit of repeated data is stopped by a signal to one rank; the others go on from what the whole one had written by
    then, as if all ranks had been killed.
    """
    place = fresh(directory)
    after = (
        11 if kind == "dataset" else 8
    )  # steps; the newest checkpoint is of step 10, the second epoch's end, or 6
    watch = None if kind == "repeated" else Watch(after, lambda: copy(place, "parts"))
    whole = fit(f"{directory}/whole", kind, watch=watch, every=3, preemption=False)

    def stop() -> None:
        if npu.distribute.rank() == npu.distribute.size() - 1:
            os.kill(os.getpid(), signal.SIGUSR1)

    if kind == "repeated":
        with settings(NPU_DEVICE_PREEMPT_SIGNAL="SIGUSR1"), pytest.raises(SystemExit, match="75"):
            fit(f"{directory}/parts", kind, watch=Watch(after, stop), every=3)
    parts = fit(f"{directory}/parts", kind, every=3)
    ended = fit(f"{directory}/parts", kind, preemption=False) if kind == "arrays" else None
    if ended is not None:
        more = fit(f"{directory}/parts", kind, epochs=EPOCHS + 1, preemption=False)
        assert more["epochs"] == [0, 1, 2, 3], more["epochs"]
    return {"whole": whole, "parts": parts, "ended": ended}


def body_alike(directory: str, kind: str) -> dict[str, Any]:
    """Go on within the second epoch, which begins with the sample of others that Keras makes and doesn't use."""
    place = fresh(directory)
    seed = next(number for number in range(10_000) if _begins_alike(kind, number))
    watch = Watch(SMALL + 3, lambda: copy(place, "parts"))
    options: dict[str, Any] = {"seed": seed, "every": 2, "preemption": False}
    whole = fit(f"{directory}/whole", kind, watch=watch, **options)
    return {"whole": whole, "parts": fit(f"{directory}/parts", kind, **options)}


def body_second_epoch(directory: str, kind: str, eager: bool = False) -> dict[str, Any]:
    """Resume in the second of four epochs."""
    place = fresh(directory)
    watches = [_Replaying, _Replaying] if kind == "repeated" else [Watch, Watch]
    options: dict[str, Any] = {"every": 2, "epochs": 4, "preemption": False}
    if eager:
        options["compiled"] = {"run_eagerly": True}
    watch = watches[0](STEPS + 3, lambda: copy(place, "parts"))
    whole = fit(f"{directory}/whole", kind, watch=watch, **options)
    return {
        "whole": whole,
        "parts": fit(f"{directory}/parts", kind, watch=watches[1](), **options),
    }


class _Replaying(Watch):
    """Trains on one more batch after each epoch, which isn't a step of ``fit``."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        super().on_epoch_end(epoch, logs)
        self.model.train_on_batch(np.ones([2, 4], np.float32), np.ones([2, 2], np.float32))


class _Nested(Watch):
    """Calls ``fit`` for other batches after each epoch."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        super().on_epoch_end(epoch, logs)
        self.model.fit(np.ones([2, 4], np.float32), np.ones([2, 2], np.float32), verbose=0)


def body_nested(directory: str) -> dict[str, Any]:
    """Resume a fit whose callback calls another one, after a signal in the second epoch."""
    fresh(directory)

    def stop() -> None:
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(0.3)  # all ranks agree on the last step

    with settings(NPU_DEVICE_PREEMPT_SIGNAL="SIGUSR1"), pytest.raises(SystemExit, match="75"):
        fit(f"{directory}/parts", "dataset", watch=_Nested(STEPS + 3, stop))
    options: dict[str, Any] = {"preemption": False}
    return {
        "whole": fit(f"{directory}/whole", "dataset", watch=_Nested(), **options),
        "parts": fit(f"{directory}/parts", "dataset", watch=_Nested(), **options),
    }


class _Stopping(Watch):
    """Stops ``fit`` within an epoch."""

    def __init__(self, after: int) -> None:
        super().__init__(after, lambda: setattr(self.model, "stop_training", True))


def body_stopped(directory: str, steps: int) -> dict[str, Any]:
    """Resume a fit that a callback has stopped after some steps."""
    fresh(directory)
    options: dict[str, Any] = {"every": 3, "preemption": False}
    stopped = fit(f"{directory}/parts", "dataset", watch=_Stopping(steps), **options)
    return {
        "stopped": stopped,
        "parts": fit(f"{directory}/parts", "dataset", **options),
        "whole": fit(f"{directory}/whole", "dataset", **options),
    }


def body_other_calls(directory: str) -> dict[str, Any]:
    """Resume after step 3 of an epoch with two steps per execution."""
    place = fresh(directory)
    watch = Watch(3, lambda: copy(place, "parts"))
    options: dict[str, Any] = {"every": 3, "preemption": False}
    fit(f"{directory}/whole", "dataset", watch=watch, **options)
    compiled = {"steps_per_execution": 2}
    return fit(f"{directory}/parts", "dataset", compiled=compiled, **options)


def body_without_epochs(directory: str) -> tuple[list[str], list[int]]:
    """Return what a fit without an epoch leaves, and the epochs of two fits whose callbacks don't know them."""
    fresh(directory)
    files: list[str] = []
    epochs = []
    for number, begin in ((1, 1), (1, 0), (2, 0)):
        checkpoint = npu.train.FitCheckpoint(directory, every=2, preemption=False)
        model, data = make_model(3, wrapped=False), make_data("dataset", 3)
        model.build((None, 4))  # tf-keras asks for it where there is no step
        callbacks = tf.keras.callbacks.CallbackList([checkpoint], add_history=True, model=model)
        model.fit(**data, epochs=number, initial_epoch=begin, verbose=0, callbacks=callbacks)
        if begin:
            files += os.listdir(directory)
        epochs.append(len(model.history.epoch))
    return files, epochs


def body_two_fits(directory: str) -> list[dict[str, Any]]:
    """Resume the second of two fits of one dataset."""
    place = fresh(directory)

    def train(name: str, watch: Watch) -> dict[str, Any]:
        model, data = make_model(3, wrapped=False), make_data("dataset", 3)
        with warnings_of_package() as texts:
            for number, callbacks in enumerate(([], [watch])):
                checkpoint = npu.train.FitCheckpoint(
                    f"{directory}/{name}/{number}", every=2, preemption=False
                )
                model.fit(**data, epochs=2, verbose=0, callbacks=[checkpoint, *callbacks])
        return {"weights": model.get_weights(), "logs": watch.logs[1], "warnings": texts}

    watch = Watch(STEPS + 3, lambda: copy(place, "parts"))
    return [train("whole", watch), train("parts", Watch())]


def body_endless(directory: str) -> dict[str, Any]:
    """Resume in the third epoch of endless data, of which Keras 3 takes 6 batches where 5 steps are asked for."""
    place = fresh(directory)
    watch = Watch(5, lambda: copy(place, "parts"))
    options: dict[str, Any] = {"compiled": {"steps_per_execution": 3}, "every": 3}
    options["preemption"] = False
    whole = fit(f"{directory}/whole", "repeated", watch=watch, **options)
    return {"whole": whole, "parts": fit(f"{directory}/parts", "repeated", **options)}


def _begins_alike(kind: str, seed: int) -> bool:
    """Return whether different orders of one shuffled dataset, from the second on, begin with the same sample."""
    tf.keras.utils.set_random_seed(seed)
    data = make_data(kind, seed)["x"]
    orders = [[x.numpy().tobytes() for x, _ in data] for _ in range(4)][1:]
    return len({order[0] for order in orders}) == 1 and len(set(map(tuple, orders))) == 3


class _Remaking(Watch):
    """Has Keras make the train function anew after each epoch, as a script does that trains other layers then, or
    within each epoch.
    """

    def __init__(self, within: bool) -> None:
        super().__init__()
        self._within = within

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._within and batch == 1:
            self.model.make_train_function(force=True)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        super().on_epoch_end(epoch, logs)
        if not self._within:
            self.model.make_train_function(force=True)


def body_made_anew(directory: str, kind: str) -> tuple[list[str], list[str]]:
    """Return what a fit of two epochs whose train function is made anew has written, and its warnings."""
    place = fresh(directory)
    watch = None if kind == "other order later" else _Remaking(kind == "within")
    done = fit(directory, kind, watch=watch, epochs=2, every=3, keep=9, preemption=False)
    npu.distribute.barrier()
    return sorted(os.listdir(place)), done["warnings"]


OTHERS = [("order", "dataset"), ("generator", "generator")]


def body_others(directory: str) -> dict[str, Any]:
    """Resume a fit that was killed in its second epoch, with several steps per execution, which don't divide it: with
    metrics in another order, with other data, and with what can't use the checkpoint.
    """
    place = fresh(directory)
    options: dict[str, Any] = {"preemption": False, "every": 3}
    compiled = {"steps_per_execution": 3, "metrics": ["mae", "mape"]}
    watch = Watch(3, lambda: [copy(place, name) for name in ("parts", "order", "generator")])
    whole = fit(f"{directory}/whole", "dataset", compiled=compiled, watch=watch, **options)
    there = sorted(os.listdir(place / "whole"))
    parts = fit(
        f"{directory}/parts",
        "dataset",
        compiled={**compiled, "metrics": ["mape", "mae"]},
        **options,
    )
    plain = {"metrics": compiled["metrics"]}
    told = [
        fit(f"{directory}/{name}", kind, seed=4, compiled=plain, **options) for name, kind in OTHERS
    ]
    loop = npu.train.JobCheckpoint(f"{directory}/loop", preemption=False, count=tf.Variable(0))
    loop.restore()
    loop.save(1)
    others: list[tuple[str, dict[str, Any]]] = [
        ("loop", {}),
        ("whole", {"epochs": 1}),
        ("whole", {}),
    ]
    errors = [
        error_of(fit, f"{directory}/{where}", "dataset", preemption=False, **more)
        for where, more in others
    ]
    for kind in (npu.train.FitCheckpoint, npu.train.JobCheckpoint):
        assert "found the URL 'gs://bucket/run'" in error_of(kind, "gs://bucket/run")
    return {"whole": whole, "parts": parts, "there": there, "told": told, "errors": errors}


def body_interrupted(directory: str) -> None:
    """After errors have ended two fits, the second of which was resumed, another fit of the model knows nothing of
    them.
    """
    place = fresh(directory)
    model, data = make_model(3, wrapped=True), make_data("dataset", 3)

    def fail() -> None:
        raise ArithmeticError

    for steps in (8, 4):
        stopping = [npu.train.FitCheckpoint(directory, every=1), Watch(steps, fail)]
        with pytest.raises(ArithmeticError):
            model.fit(**data, epochs=3, verbose=0, callbacks=stopping)
    there = sorted(os.listdir(place))
    assert there[-1] == "step-00000011"
    before = model.get_weights()
    history = model.fit(**data, epochs=2, verbose=0)
    assert history.epoch == [0, 1]
    assert any((old != new).any() for old, new in zip(before, model.get_weights()))
    assert sorted(os.listdir(place)) == there


def body_large_data(directory: str) -> None:
    """Resume in the third epoch of data that go on, when 200 MB have been read in the two before."""
    fresh(directory)
    sizes: list[int] = []

    def batches() -> Any:
        while True:
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            sizes.append(pages * resource.getpagesize())
            yield np.full([1, 2**18], len(sizes), np.float32), np.ones([1, 1], np.float32)

    for _ in range(2):
        model = tf.keras.Sequential([tf.keras.Input([2**18]), tf.keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        sizes.clear()
        checkpoint = npu.train.FitCheckpoint(directory, each_epoch=False, preemption=False)
        model.fit(batches(), steps_per_epoch=100, epochs=3, verbose=0, callbacks=[checkpoint])
    assert len(sizes) >= 300
    assert max(sizes) - sizes[0] < 100e6, (sizes[0], max(sizes))


def kill_this_process() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def ask_npurun_to_stop() -> None:
    """Return when this rank has been asked in turn."""
    handler = signal.getsignal(signal.SIGTERM)
    got: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: got.append(number))
    # npurun has started the first process of this process group.
    os.kill(parent_and_start(os.getpgid(0))[0], signal.SIGTERM)
    while not got:
        time.sleep(0.01)
    signal.signal(signal.SIGTERM, handler)
    os.kill(os.getpid(), signal.SIGTERM)


def main() -> None:
    """Train; with "interrupted", rank 1 is killed in step 8, and npurun asked to stop in the first step after that.

    Whoever comes to the end compares with a training that nothing interrupts.
    """
    directory, how = sys.argv[1:]
    npu.open().as_default()
    again = int(os.environ.get("NPU_DEVICE_RESTART_COUNT", "0"))
    after, action = (1, ask_npurun_to_stop) if again else (8, kill_this_process)
    is_hit = how == "interrupted" and npu.distribute.rank() == 1
    watch = Watch(after if is_hit else 0, action)
    parts = fit(f"{directory}/parts", "repeated", watch=watch, every=3)
    whole = fit(f"{directory}/whole", "repeated", preemption=False)
    assert parts["not_kept"] == () and list(parts["logs"]) in ([1, 2], [2]), parts["logs"]
    same_bits(whole["values"], parts["values"])


if __name__ == "__main__":
    main()
