"""Trainings in which several ranks may be faster than one process, each with one global batch: ``python`` this script,
``npurun -n N`` or ``npurun speed`` this script, with the name of a case.

They train for ever; with ``--by-hand STEPS``, they print the seconds of a step after so many, and end.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Callable

sys.path.insert(0, str(Path(__file__).parents[1]))

import npu_device as npu

npu.open(seed=1).as_default()

import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

keras: Any = tf.keras

BATCH = 64
"""Samples of all ranks together."""

_WARM_UP = 40  # steps
_FEATURES = 32
_LONG = 1_000_000  # steps or samples


class Watch:
    """Times some steps, for a person who compares by hand."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._count = 0
        self._begin: tuple[int, float] | None = None

    def step(self) -> None:
        self._count += 1

    def is_over(self) -> bool:
        """Return True, once, after the timed steps; called between two steps, or between two epochs."""
        if not self._steps or self._count < _WARM_UP:
            return False
        if self._begin is None:
            # Otherwise Python may look through all of its objects within the timed steps, 0.25 s once in a training.
            gc.collect()
            self._begin = (self._count, time.perf_counter())
            return False
        count = self._count - self._begin[0]
        if count < self._steps:
            return False
        seconds = time.perf_counter() - self._begin[1]
        print(f"seconds of a step: {seconds / count:.6f}", flush=True)
        return True


class Stop(keras.callbacks.Callback):
    """Lets a watch end ``fit``, after a step or after a whole epoch."""

    def __init__(self, watch: Watch, whole_epochs: bool = False) -> None:
        super().__init__()
        self._watch = watch
        self._whole_epochs = whole_epochs

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._watch.step()
        if not self._whole_epochs and self._watch.is_over():
            self.model.stop_training = True

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if self._whole_epochs and self._watch.is_over():
            self.model.stop_training = True


def features(number: int) -> list[float]:
    """Return the features of a sample, in 3,000 iterations of plain Python: 0.3 to 1 ms."""
    counts = [0.0] * _FEATURES
    code = number + 1
    for _ in range(3000):
        code = (code * 1103515245 + 12345) & 0x7FFFFFFF
        # The low bits of such a generator are the same for all samples.
        counts[(code >> 16) % _FEATURES] += 1e-3
    return counts


def dense_model(width: int = 64) -> Any:
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input([_FEATURES]),
            layers.Dense(width, "relu"),
            layers.Dense(width, "relu"),
            layers.Dense(1),
        ]
    )


def compiled(model: Any) -> Any:
    """Return a model that every rank trains with its share of the batch."""
    model.compile(keras.optimizers.SGD(1e-4), "mse")
    return npu.distribute.replicate(model)


def python_in_the_step(watch: Watch) -> None:
    """Compute features of this rank's samples in Python, of which one thread runs at a time, in an own loop."""
    model = dense_model()
    optimizer = keras.optimizers.SGD(1e-4)
    npu.distribute.broadcast(model.weights)
    train = _step_of(model, optimizer)
    numbers, batch = npu.distribute.shard_and_rebatch_dataset(tf.data.Dataset.range(_LONG), BATCH)
    for indices in numbers.batch(batch):
        x = tf.constant([features(int(number)) for number in indices.numpy()])
        train(x, tf.reduce_sum(x, axis=1, keepdims=True))
        watch.step()
        if watch.is_over():
            return


def _step_of(model: Any, optimizer: Any) -> Callable[[tf.Tensor, tf.Tensor], None]:
    @tf.function
    def step(x: tf.Tensor, y: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
        gradients = npu.distribute.all_reduce(tape.gradient(loss, model.trainable_variables))
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))

    return step


def pydataset(watch: Watch) -> None:
    """Compute features in a ``PyDataset``, whose ``rows`` computes those of this rank's samples only."""
    base = keras.utils.Sequence
    if hasattr(keras.utils, "PyDataset"):
        base = keras.utils.PyDataset

    class Features(base):  # type: ignore[misc, valid-type]
        def __len__(self) -> int:
            return _LONG

        def __getitem__(self, index: int) -> Any:
            return self.rows(index, 0, BATCH)

        def rows(self, index: int, start: int, stop: int) -> Any:
            numbers = range(index * BATCH + start, index * BATCH + stop)
            x = np.array([features(number) for number in numbers], "float32").reshape(-1, _FEATURES)
            return x, x.sum(axis=1, keepdims=True)

    compiled(dense_model()).fit(Features(), verbose=0, shuffle=False, callbacks=[Stop(watch)])


def generator(watch: Watch) -> None:
    """Compute features in a Python generator, of which each rank has one with samples of its own (``divided``)."""
    rank, size = npu.distribute.rank(), npu.distribute.size()

    def samples() -> Iterator[Any]:
        for number in itertools.count(rank, size):
            x = features(number)
            yield x, [sum(x)]

    shapes = (tf.TensorSpec([_FEATURES]), tf.TensorSpec([1]))
    dataset = tf.data.Dataset.from_generator(samples, output_signature=shapes)
    dataset = dataset.batch(BATCH // size, drop_remainder=True).prefetch(2)
    # Otherwise ``divided`` reads the dataset once to count its batches.
    dataset = dataset.apply(tf.data.experimental.assert_cardinality(_LONG))
    compiled(dense_model()).fit(npu.distribute.divided(dataset), verbose=0, callbacks=[Stop(watch)])


def recurrent(watch: Watch) -> None:
    """Train a recurrent model, whose operations come one after the other."""
    model = keras.Sequential(
        [keras.Input([50, _FEATURES]), keras.layers.LSTM(64, unroll=False), keras.layers.Dense(1)]
    )
    x = np.random.default_rng(1).normal(size=[BATCH, 50, _FEATURES]).astype("float32")
    _fit_arrays(model, x, watch)


def _fit_arrays(model: Any, x: Any, watch: Watch) -> None:
    dataset = tf.data.Dataset.from_tensors((x, x[..., :1].reshape(len(x), -1)[:, :1])).repeat(_LONG)
    compiled(model).fit(dataset, verbose=0, callbacks=[Stop(watch)])


def pipeline(watch: Watch) -> None:
    """Decode JPEG files of records, shuffled, with ``npu.distribute.pipeline``."""
    from benchmarks import images

    model = npu.distribute.replicate(images.model(keras.__name__.partition(".")[0]))
    batches = images.batches("records", True, samples=_LONG)
    model.fit(batches, verbose=0, callbacks=[Stop(watch)])


def several_models(watch: Watch) -> None:
    """Train eight small models of one script, one after the other, with each batch."""
    models = [dense_model(128) for _ in range(8)]
    steps = []
    for model in models:
        npu.distribute.broadcast(model.weights)
        steps.append(_step_of(model, keras.optimizers.SGD(1e-4)))
    x = np.random.default_rng(1).normal(size=[_LONG // 100, _FEATURES]).astype("float32")
    dataset, batch = npu.distribute.shard_and_rebatch_dataset(
        tf.data.Dataset.from_tensor_slices(x).repeat(_LONG), BATCH
    )
    for samples in dataset.batch(batch):
        target = tf.reduce_sum(samples, axis=1, keepdims=True)
        for step in steps:
            step(samples, target)
        watch.step()
        if watch.is_over():
            return


def short_epochs(watch: Watch) -> None:
    """Train in epochs of ten steps, with a validation after each. No case that gains: it shows what is timed."""
    x = np.random.default_rng(1).normal(size=[10 * BATCH, _FEATURES]).astype("float32")
    y = x.sum(axis=1, keepdims=True)
    compiled(dense_model(512)).fit(
        x,
        y,
        batch_size=BATCH,
        epochs=_LONG,
        verbose=0,
        validation_data=(x, y),
        callbacks=[Stop(watch, whole_epochs=True)],
    )


CASES = {
    case.__name__: case
    for case in (
        python_in_the_step,
        pydataset,
        generator,
        recurrent,
        pipeline,
        several_models,
        short_epochs,
    )
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--by-hand", type=int, default=0, metavar="STEPS")
    options = parser.parse_args()
    CASES[options.case](Watch(options.by_hand))
    # Keras leaves the iterator of a ``PyDataset`` to the garbage; freed while Python shuts down, it waits for ever.
    gc.collect()


if __name__ == "__main__":
    main()
