"""``npu.distribute.pipeline``, and ``rows`` of a Sequence: one process's batches, of which each rank makes its part."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import tensorflow as tf
from caught_messages import error_of, warnings_of_package
from fit_models import CLASS_WEIGHT, outcome, replicated, samples
from pool import Pool
from rank_comparison import compare, same_bits

import npu_device as npu

SAMPLES = 31


class _Pair(NamedTuple):
    left: Any
    right: Any


def _pipelines(directory: str) -> dict[str, Any]:
    """Return a pipeline of each kind."""
    pipeline, numbers = npu.distribute.pipeline, tf.data.Dataset.range(11)
    cached = numbers.map(lambda number: number + 1).cache()
    files = tf.data.Dataset.list_files(f"{directory}/*.records", seed=5)
    records = files.interleave(tf.data.TFRecordDataset, num_parallel_calls=2)
    pairs = tf.data.Dataset.zip(
        (numbers, numbers.map(lambda number: {"text": tf.strings.as_string(number)}))
    )

    def square(number: Any) -> Any:
        if number > 4:  # AutoGraph converts the map
            number = -number
        return number * number

    def noisy(number: Any, seed: Any) -> Any:
        return number, tf.random.stateless_normal([2], seed)

    def nested(one: Any, other: Any) -> Any:
        return {"a": (one, other["text"]), "b": [[one]] * 2}

    def python(number: Any) -> Any:
        return tf.numpy_function(abs, [number], tf.int64, stateful=False)

    def named(pair: Any) -> Any:
        return pair.left + pair.right

    return {
        "shuffled": pipeline(cached.shuffle(20, seed=3).prefetch(2), square, 3),
        "repeated": pipeline(numbers.repeat(2), square, 4).repeat(2).take(9),
        "cached": pipeline(numbers, noisy, 4, seed=7).cache().repeat(2),
        "records": pipeline(records, lambda record: tf.io.decode_raw(record, tf.uint8)[0], 4),
        "seeds": pipeline(numbers, noisy, 4, seed=7),
        "structures": pipeline(pairs, nested, 5),
        "named": pipeline(numbers.map(lambda number: _Pair(number, 2 * number)), named, 3),
        "sparse": pipeline(
            tf.data.Dataset.from_tensor_slices(tf.sparse.eye(11)), lambda row: row, 4
        ),
        "tiny": pipeline(numbers, python, 1),
        "full": pipeline(numbers, python, np.int64(4), drop_remainder=True),
        "in files": pipeline(numbers, square, 4).cache(f"{directory}/cache"),
    }


def _array(tensor: Any) -> np.ndarray:
    return (tf.sparse.to_dense(tensor) if isinstance(tensor, tf.SparseTensor) else tensor).numpy()


def body_batches(directory: str) -> dict[str, Any]:
    """Two epochs of each pipeline, by kind, and what it says of itself."""
    found: dict[str, Any] = {}
    for kind, data in _pipelines(directory).items():
        epochs = [[tf.nest.map_structure(_array, batch) for batch in data] for _ in range(2)]
        spec = tf.nest.map_structure(
            lambda each: (str(each.shape[1:]), each.dtype.name), data.element_spec
        )
        found[kind] = epochs, int(data.cardinality()), repr(spec)
    return found


def test_batches_are_those_of_one_process(two_ranks: Pool, single: Pool, tmp_path: Path) -> None:
    for file in range(3):
        with tf.io.TFRecordWriter(f"{tmp_path}/{file}.records") as writer:
            for record in range(3 + file):
                writer.write(bytes([10 * file + record]))
    [alone] = single.run(body_batches, str(tmp_path))
    ranks = two_ranks.run(body_batches, str(tmp_path))
    for kind, (epochs, length, spec) in alone.items():
        assert [rank[kind][1:] for rank in ranks] == [(length, spec)] * 2, kind
        for epoch, batches in enumerate(epochs):
            assert [len(rank[kind][0][epoch]) for rank in ranks] == [len(batches)] * 2, kind
            for step, batch in enumerate(batches):
                parts = [rank[kind][0][epoch][step] for rank in ranks]
                together = tf.nest.map_structure(lambda *leaves: np.concatenate(leaves), *parts)
                tf.nest.map_structure(np.testing.assert_array_equal, together, batch)
                if kind in ("shuffled", "tiny"):
                    assert max(map(len, parts)) <= -(-len(batches[0]) // 2)


def body_fit(kind: str, batch: int) -> Any:
    """``fit`` with validation, and ``evaluate``, on a pipeline, or on a Sequence with ``rows``."""
    x, y = samples(SAMPLES)
    made: list[int] = []

    class Data(tf.keras.utils.Sequence):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.order = np.arange(SAMPLES)

        def __getitem__(self, index: int) -> Any:
            return self.rows(index, 0, batch)

        def rows(self, index: int, start: int, stop: int) -> Any:
            chosen = self.order[index * batch : (index + 1) * batch][start:stop]
            made.append(len(chosen))
            return np.stack([x[row] for row in chosen]), y[chosen]  # fails without rows

        def on_epoch_end(self) -> None:
            np.random.shuffle(self.order)

    length = (SAMPLES + batch - 1) // batch
    if not hasattr(Data, "num_batches"):
        Data.__len__ = lambda self: length
    else:
        Data.num_batches = property(lambda self: length)  # a PyDataset needs no length

    def data() -> Any:
        if kind == "sequence":
            return Data()
        indices = tf.data.Dataset.range(SAMPLES).shuffle(SAMPLES, seed=3)
        return npu.distribute.pipeline(
            indices, lambda index: (tf.gather(x, index), tf.gather(y, index)), batch
        )

    model = replicated()
    tf.keras.utils.set_random_seed(4)
    with warnings_of_package() as said:
        train, valid = data(), data()
        history = model.fit(
            train, validation_data=valid, epochs=2, verbose=0, class_weight=CLASS_WEIGHT
        )
        scores = model.evaluate(valid, verbose=0, return_dict=True)
    assert said == []
    if (
        kind == "sequence" and npu.distribute.size() > 1
    ):  # whole is the first batch, at the beginning of each call
        assert sum(rows > 1 + batch // npu.distribute.size() for rows in made) <= 3
    return outcome(model, history, scores=scores)


@pytest.mark.parametrize("kind", ["pipeline", "sequence"])
def test_fit_is_that_of_one_process(
    several_keras_ranks: Pool, keras_single: Pool, kind: str
) -> None:
    compare(several_keras_ranks, keras_single, body_fit, kind, 10)  # the last batch has one sample


def body_in_callbacks(directory: str) -> Any:
    """``evaluate`` in a callback of ``fit``, on data of which each rank has its part; and callbacks that write."""
    x, y = samples(SAMPLES)
    rank, size = npu.distribute.rank(), npu.distribute.size()
    rows = lambda index: (tf.gather(x, index), tf.gather(y, index))  # noqa: E731
    data = [
        npu.distribute.pipeline(tf.data.Dataset.range(SAMPLES), rows, 10),
        npu.distribute.divided(
            tf.data.Dataset.from_tensor_slices((x, y)).shard(size, rank).batch(5)
        ),
    ]
    scores = []
    model = replicated()

    def evaluate(epoch: int, logs: Any) -> None:
        for test in data:
            scores.append(model.evaluate(test, verbose=0, return_dict=True))
            if size > 1:
                assert "pass all of the data" in error_of(model.predict, test, verbose=0)

    history = model.fit(
        *(x, y, 10),
        epochs=2,
        verbose=0,
        validation_data=(x, y),
        callbacks=[tf.keras.callbacks.LambdaCallback(on_epoch_end=evaluate)],
    )
    for method in (model.evaluate, model.predict):
        board = tf.keras.callbacks.TensorBoard(f"{directory}/{size}/{rank}")
        method(x, callbacks=[board], verbose=0, **({"y": y} if method == model.evaluate else {}))
    assert os.path.exists(f"{directory}/{size}/{rank}") is npu.distribute.is_main()
    return outcome(model, history, scores=scores)


@pytest.mark.once
def test_callbacks_may_evaluate_and_only_rank_0_writes(
    keras_two_ranks: Pool, keras_single: Pool, tmp_path: Path
) -> None:
    compare(keras_two_ranks, keras_single, body_in_callbacks, directory=tmp_path)


def body_slow_input() -> list[str]:
    """The warnings of a ``fit`` that waits for its data."""

    def slow(x: Any) -> Any:
        time.sleep(0.3 if x[0, 0] > 18 else 0)  # only where it is timed
        return x

    def prepare(x: Any, y: Any) -> Any:
        return tf.ensure_shape(tf.numpy_function(slow, [x], tf.float32), [4, 6]), y

    x = np.repeat(np.arange(28, dtype=np.float32), 4)[:, None] * np.ones(6, np.float32)
    y = np.zeros(len(x), np.int32)
    with warnings_of_package() as said:
        replicated().fit(
            tf.data.Dataset.from_tensor_slices((x, y)).batch(4).map(prepare), verbose=0
        )
    return said


@pytest.mark.once
def test_input_that_takes_a_quarter_of_a_step_is_named_once(keras_two_ranks: Pool) -> None:
    [text], others = keras_two_ranks.run(body_slow_input)
    assert others == []
    assert text.startswith("input takes ") and "npu.distribute.pipeline(source, map, batch)" in text


def body_refused() -> list[str]:
    """The messages of what can't be divided."""
    pipeline = npu.distribute.pipeline
    rank = npu.distribute.rank()
    numbers = tf.data.Dataset.range(8)
    options = tf.data.Options()
    options.autotune.enabled = True
    tuned = [
        pipeline(each, abs, 4).dataset.options().autotune
        for each in (numbers, numbers.with_options(options))
    ]
    assert [each.enabled for each in tuned] == [False, True]  # only the user turns it on
    total = tf.Variable(0, dtype=tf.int64)

    class Wrong(tf.keras.utils.Sequence):  # type: ignore[misc]
        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: int) -> Any:
            return self.rows(index, 0, 4)

        def rows(self, index: int, start: int, stop: int) -> Any:
            return np.full([stop - start, 6], index, np.float32), np.arange(stop - start)

    plain = pipeline(numbers, lambda number: number, 4)
    own_order = tf.data.Dataset.from_tensor_slices(np.roll(samples(8)[0], rank))
    calls: list[Any] = [
        lambda: pipeline(
            numbers, lambda number: tf.image.random_flip_left_right(tf.fill([2, 2, 1], number)), 4
        ),
        lambda: pipeline(numbers, total.assign_add, 4),
        lambda: pipeline(numbers, lambda number: tf.py_function(abs, [number], tf.int64), 4),
        lambda: plain.padded_batch(4),
        lambda: plain.map(abs),
        lambda: pipeline(numbers.shuffle(8), abs, 4),
        lambda: pipeline(numbers.shuffle(8, seed=rank), abs, 4),
        lambda: replicated().fit(pipeline(own_order, lambda x: (x, 0), 4), verbose=0),
        lambda: replicated().fit(Wrong(), verbose=0),
        lambda: pipeline([1, 2], abs, 4),
        lambda: pipeline(numbers, abs, 0),
        lambda: replicated().predict(plain),
    ]
    return [error_of(call) for call in calls]


def test_what_cannot_be_divided_is_refused(two_ranks: Pool) -> None:
    wanted = [
        ["random numbers (RandomUniform", "seed=1", "stateless_random_flip_left_right"],
        ["AssignAddVariableOp", "npu.distribute.divided"],
        ["EagerPyFunc", "stateful=False"],
        ["padded_batch() after", "fixed length"],
        ["map() after", "the map of pipeline", ".dataset"],
        ["without a seed", "npu.open(seed=1)"],
        ["different sources", "rank 1", "same seed"],
        ["different batches", "rank 1", "deterministic=True"],
        ["rows(0, ", "on ranks 1", "samples from start"],
        ["expected a tf.data.Dataset", "list"],
        ["1 sample or more; found 0"],
        ["predict", "pass all of the data"],
    ]
    for said in two_ranks.run(body_refused):
        for text, parts in zip(said, wanted):
            assert text.startswith(("AttributeError", "TypeError", "ValueError"))
            assert all(part in text for part in parts), text


def body_other_lengths() -> tuple[int, list[np.ndarray]]:
    """Train on data of which each reading has another number of batches: 4 as they are counted, then 3 or 5."""
    readings = itertools.chain([4], itertools.cycle([3, 5]))
    value = np.float32(npu.distribute.rank())

    def batches() -> Iterator[Any]:
        for _ in range(next(readings)):
            yield np.full([2, 3], value), np.full([2, 1], value)

    spec = tf.TensorSpec([None, 3]), tf.TensorSpec([None, 1])
    dataset = tf.data.Dataset.from_generator(batches, output_signature=spec)
    model = tf.keras.Sequential([tf.keras.Input([3]), tf.keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    npu.distribute.replicate(model)
    model.fit(npu.distribute.divided(dataset), epochs=2, verbose=0)
    return int(model.optimizer.iterations), model.get_weights()


@pytest.mark.once
def test_each_epoch_of_divided_data_has_the_counted_number_of_batches(
    keras_two_ranks: Pool,
) -> None:
    results = keras_two_ranks.run(body_other_lengths)
    assert [steps for steps, _ in results] == [8, 8]
    same_bits(*(weights for _, weights in results))
