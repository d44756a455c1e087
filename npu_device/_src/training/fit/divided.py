"""Data of which each rank has its own part, and how each batch says how much: ``npu.distribute.divided``, a dataset;
``npu.distribute.pipeline``, whose map runs for the rows of this rank only; and a ``keras.utils.PyDataset`` or
``Sequence`` with a method ``rows``, by which each rank makes its own rows of a batch.

Every rank reads the source of a pipeline, which should be cheap: file names, records, indices. The rows of each batch
are cut before the map, so that batches, order and numbers are as in one process.
"""

from __future__ import annotations

import functools
import operator
import re
import sys
import time
from functools import partial
from typing import Any, Callable

import numpy as np
import tensorflow as tf

from npu_device._src import compat
from npu_device._src.training.fit import start
from npu_device._src.training.fit.batch_checksum import checksum_of
from npu_device._src.training.opening.current_world import world_unless_child
from npu_device._src.world.share import ROWS, bounds_of_rank, rows_of, run_of
from npu_device._src.world.world import World

_RANDOM = re.compile(
    "Random|Multinomial|TruncatedNormal|ParameterizedTruncated|Stateful(?!Partitioned)|Rng|SampleDistorted|"
    r"\w*CandidateSampler"
)
_STATEFUL = re.compile(
    r"Assign|Resource(?!Gather)|(Eager)?PyFunc$|LookupTable(Insert|Import|Remove)|Queue|Stack|Barrier"
)
_WHOLE_BATCHES = ("prefetch", "repeat", "skip", "take")
_REMEDIES = {
    "map": "call it in the map of pipeline, for one sample; mix the samples of a batch in the step of the model",
    "padded_batch": "pad each sample to a fixed length in the map of pipeline, and pass batch=",
    "batch": "pass batch= to pipeline",
    "shuffle": "shuffle the source",
}
_TELL_SECONDS = 10  # between two lines about a long count
# Settings of a PyDataset in Keras 3.
_SETTINGS = ("workers", "use_multiprocessing", "max_queue_size")


class OwnData:
    """The dataset that ``divided`` returns on several ranks: the batches of this rank."""

    def __init__(self, dataset: tf.data.Dataset) -> None:
        self.dataset = dataset


def divided(dataset: Any) -> Any:
    """Mark a dataset of which each rank reads its own part, for ``fit`` or ``evaluate`` of a replicated model.

    Args:
        dataset: a ``tf.data.Dataset`` of batches, those of this rank. The batches of all ranks together are the batch
            of a step, weighted by their samples. If the data of a rank end early, it takes part without samples until
            all ranks are done.

    Returns:
        An argument for ``fit``, ``evaluate`` or ``validation_data`` of a model that ``replicate`` has returned; on a
        single device the dataset itself.

    Raises:
        TypeError: not a ``tf.data.Dataset``.

    If a dataset doesn't know its length, it is read once to count its batches, and each epoch has that number. Give
    an endless one ``tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY)``, and ``fit``
    ``steps_per_epoch``.

    >>> import tensorflow as tf, npu_device as npu
    >>> dataset = tf.data.Dataset.range(3).batch(2)
    >>> npu.distribute.divided(dataset) is dataset  # a single device
    True
    """
    if not isinstance(dataset, tf.data.Dataset):
        raise TypeError(
            f"expected a tf.data.Dataset of batches for this rank; found a {type(dataset).__name__}.\n"
            "What to do: make one, for instance tf.data.Dataset.from_tensor_slices((x, y)).batch(size)."
        )
    if world_unless_child() is None:
        return dataset
    return OwnData(dataset)


def with_equal_length(world: World, own_data: OwnData) -> tf.data.Dataset:
    """Return a dataset with the same number of batches on every rank; samples of the added batches don't count."""
    dataset = own_data.dataset
    length = int(dataset.cardinality())
    if length == tf.data.UNKNOWN_CARDINALITY:
        # The dataset of a generator, for instance, has no length: only counting tells.
        length = _count(world, dataset)
    lengths = world.objects(length, "length of divided data")

    def tagged(factor: int, *batch: Any) -> Any:
        row_count = tf.cast(rows_of(batch) * factor, tf.int64)
        return with_tag(tf.stack([row_count, 0]), batch)

    counted = dataset.map(partial(tagged, 1))
    # Keras stops after ``steps_per_epoch``, which all ranks are given.
    if tf.data.INFINITE_CARDINALITY in lengths:
        return counted
    if 0 in lengths:
        raise ValueError(
            "a rank has no data at all: batches by rank "
            + ", ".join(f"{rank}: {count}" for rank, count in enumerate(lengths))
            + ".\nWhat to do: divide the data so that each rank has at least one sample, or start fewer ranks."
        )
    # Added batches are real ones, whose shapes and dtypes are right, and count as empty.
    empty_batch = dataset.take(1).map(partial(tagged, 0))
    longest = max(lengths)
    # Another reading may be shorter or longer, for instance after a random filter.
    filled = counted.concatenate(empty_batch.repeat()).take(longest)
    # TensorFlow may not know the length, which has been counted here.
    return filled.apply(tf.data.experimental.assert_cardinality(longest))


def _count(world: World, dataset: tf.data.Dataset) -> int:
    """Return the number of batches of a dataset; print how many there are so far while that takes long."""
    count = 0
    line_time = time.monotonic()
    for _ in dataset:
        count += 1
        if time.monotonic() > line_time + _TELL_SECONDS:
            line_time = time.monotonic()
            print(
                f"npu_device: rank {world.group.rank} counts the batches of its divided data, whose length it doesn't "
                f"know: {count} so far. What to do: dataset.apply(tf.data.experimental.assert_cardinality(batches)); "
                "of endless data, tf.data.INFINITE_CARDINALITY and steps_per_epoch",
                file=sys.stderr,
                flush=True,
            )
    return count


def with_tag(tag: Any, batch: Any) -> Any:
    """Return a batch with its tag, int64 of shape [2]: the samples that count, and a mark of their batch: equal on all
    ranks that take their rows from the same batch; 0 for ``divided``, whose ranks read different ones.
    """
    if not isinstance(batch, (tuple, list)):
        batch = [batch]
    x, *targets = batch
    return ({ROWS: tag, "x": x}, *targets)


def sequence_of_rank(world: World, model: Any, sequence: Any) -> Any:
    """Return a PyDataset or Sequence of the rows of this rank in each batch; none is larger than the first one."""
    batch = sequence[0]
    begin, end = bounds_of_rank(int(rows_of(batch)), world.rank, world.size)
    _require_same_rows(world, batch, sequence.rows(0, begin, end), begin, end)

    settings = {name: getattr(sequence, name) for name in _SETTINGS if hasattr(sequence, name)}
    sequence_class = _class_of_rank(compat.keras_of(model).utils.Sequence)
    return sequence_class(sequence, begin, end, **settings)


@functools.cache
def _class_of_rank(sequence_class: Any) -> Any:
    """Return the class of data with the rows of this rank, made once: TensorFlow never frees the class of data."""

    class SequenceOfRank(sequence_class):
        """The rows of this rank; a batch without any has one that doesn't count."""

        def __init__(self, sequence: Any, begin: int, end: int, **settings: Any) -> None:
            super().__init__(**settings)
            self._sequence = sequence
            self._begin = begin
            self._end = end

        def __len__(self) -> int:
            return len(self._sequence)

        @property
        def num_batches(self) -> int | None:
            # A Sequence of tf-keras has a length only, a PyDataset of Keras 3 perhaps none.
            if hasattr(self._sequence, "num_batches"):
                return self._sequence.num_batches
            return len(self)

        def __getitem__(self, index: int) -> Any:
            sequence = self._sequence
            mark = index
            # The first batch of an epoch is marked by its content, since on_epoch_end may have shuffled the data.
            if not index:
                mark = start.full_checksum(sequence.rows(0, 0, 1))
            start_row = self._begin
            # Read from the start, a batch has rows also for a rank without a share, or one that the last batch leaves
            # without rows: no samples would fail in np.stack.
            if self._end == start_row or index + 1 == self.num_batches:
                start_row = 0
            rows = sequence.rows(index, start_row, max(self._end, 1))
            total = int(rows_of(rows))
            count = max(min(start_row + total, self._end) - self._begin, 0)
            # Keras needs at least one sample to call the step, which the other ranks do.
            own_rows = run_of(rows, total, total - max(count, 1), total, "first")
            return with_tag(np.array([count, mark]), own_rows)

        def on_epoch_begin(self) -> None:
            getattr(self._sequence, "on_epoch_begin", int)()

        def on_epoch_end(self) -> None:
            self._sequence.on_epoch_end()

    return SequenceOfRank


def _require_same_rows(world: World, batch: Any, rows: Any, begin: int, end: int) -> None:
    expected = run_of(batch, int(rows_of(batch)), begin, end, "first")
    is_right = start.full_checksum(expected) == start.full_checksum(rows)
    # All ranks raise together: one alone would leave the others waiting in their first step.
    are_right = world.objects(is_right, "rows of the first batch")
    wrong_ranks = [rank for rank, is_right in enumerate(are_right) if not is_right]
    if wrong_ranks:
        wrong = ", ".join(map(str, wrong_ranks))
        raise ValueError(
            f"rank {world.rank}: rows(0, {begin}, {end}) isn't data[0][{begin}:{end}] (on ranks {wrong}).\n"
            "Likely cause: rows draws random numbers, or counts its samples from the beginning of the data.\nWhat to "
            "do: let rows(index, start, stop) return what data[index] returns, but only the samples from start to "
            "before stop of that batch; draw random numbers by a seed made of the index of the sample."
        )


class Pipeline(OwnData):
    """The batches of ``pipeline`` on several ranks; pass it to ``fit`` of a replicated model, or iterate over it.

    ``cache``, ``prefetch``, ``repeat``, ``skip`` and ``take`` act on whole batches, and return a pipeline again. What
    would act on the samples of a batch raises an AttributeError, with the remedy.

    Attributes:
        dataset: the rows of this rank in each batch, in the last ones perhaps none.
        for_keras: the same with the number of rows inside; a batch without rows has one that doesn't count.
    """

    def __init__(self, tagged: tf.data.Dataset, are_full: bool) -> None:
        self._tagged = tagged  # a dataset of pairs: tags of rows, and the rows
        self._are_full = are_full  # True if all batches have the same number of rows
        rows = tagged.map(lambda tags, rows: rows)
        if not are_full:
            rows = tagged.map(_rows_that_count)
        super().__init__(rows)
        self.for_keras = tagged.map(_with_common_tag)

    def cache(self, filename: str = "") -> Pipeline:
        """Keep the rows of this rank after the map, in memory or in files, whose names end with the rank."""
        world = world_unless_child()
        # Ranks of one host must not write the same files.
        if filename and world is not None:
            filename = f"{filename}.rank{world.rank}of{world.size}"
        return Pipeline(self._tagged.cache(filename), self._are_full)

    def __iter__(self) -> Any:
        return iter(self.dataset)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getattr__(self, name: str) -> Any:
        if name in ("element_spec", "cardinality", "as_numpy_iterator"):
            return getattr(self.dataset, name)
        if name in _WHOLE_BATCHES:
            return lambda *args, **kwargs: Pipeline(
                getattr(self._tagged, name)(*args, **kwargs), self._are_full
            )
        if name.startswith("_") or not hasattr(tf.data.Dataset, name):
            raise AttributeError(f"a pipeline has no attribute {name!r}")
        remedy = _REMEDIES.get(name, "apply it to the source")
        raise AttributeError(
            f"{name}() after npu.distribute.pipeline isn't divided among the ranks: each rank has only its rows of a "
            f"batch.\nWhat to do: {remedy}. Allowed: cache, {', '.join(_WHOLE_BATCHES)}. To treat each sample by "
            "itself, use .dataset, the tf.data.Dataset of the rows of this rank."
        )


def pipeline(
    source: Any,
    map: Callable,
    batch: int,
    *,
    seed: int | None = None,
    drop_remainder: bool = False,
    num_parallel_calls: int = tf.data.AUTOTUNE,
) -> Any:
    """Return the batches of ``source.map(map).batch(batch)``; on several ranks each maps its own rows only.

    Args:
        source: a ``tf.data.Dataset`` of single elements that are cheap to read, the same in the same order on every
            rank: file names, records, indices. It may shuffle, with a seed, repeat, cache, interleave and prefetch.
        map: the expensive part: gets an element as in ``tf.data.Dataset.map``, and returns a sample.
        batch: samples in a batch over all ranks together; any number.
        seed: if given, ``map`` gets a further argument: the seed of the sample, int64 of shape [2], for
            ``tf.random.stateless_*`` and ``tf.image.stateless_random_*``. It differs in each epoch.
        drop_remainder: leave a smaller last batch out.
        num_parallel_calls: calls of ``map`` at the same time on this rank.

    Returns:
        A ``tf.data.Dataset`` on a single device. On several ranks a ``Pipeline``: an argument of ``fit`` or
        ``evaluate`` of a replicated model, or an iterable of the rows of this rank in each batch. Rows of neighbouring
        ranks are neighbours in the batch. All ranks have the same number of batches; in a smaller last batch, some may
        have no rows.

    Raises:
        TypeError: ``source`` isn't a ``tf.data.Dataset``, ``map`` can't be called, or ``batch`` isn't an integer.
        ValueError: ``batch`` isn't positive. On several ranks also: ``map`` draws random numbers without a seed for
            each sample, calls Python, or changes variables; ``source`` is shuffled without a seed, or differs.

    >>> import tensorflow as tf, npu_device as npu
    >>> batches = npu.distribute.pipeline(tf.data.Dataset.range(5), lambda number: 10 * number, batch=3)
    >>> [each.tolist() for each in batches.as_numpy_iterator()]  # a single device
    [[0, 10, 20], [30, 40]]
    """
    if not isinstance(source, tf.data.Dataset):
        raise TypeError(
            f"expected a tf.data.Dataset as the source of a pipeline; found a {type(source).__name__}.\n"
            "What to do: make one, for instance tf.data.Dataset.from_tensor_slices(file_names)."
        )
    if not callable(map):
        raise TypeError(
            f"expected a function as the map of a pipeline; found a {type(map).__name__}"
        )
    size = operator.index(batch)
    if size < 1:
        raise ValueError(f"the batch of a pipeline must have 1 sample or more; found {size}")
    call = map
    if seed is not None:
        call = partial(_call_with_seed, map)
        # The stateless operations of TensorFlow take two numbers as a seed.
        numbers = tf.data.Dataset.random(seed, rerandomize_each_iteration=True)
        seeds = numbers.batch(2, drop_remainder=True)
        source = tf.data.Dataset.zip((source, seeds))

    world = world_unless_child()
    if world is None:
        mapped = source.map(call, num_parallel_calls)
        return mapped.batch(size, drop_remainder).prefetch(tf.data.AUTOTUNE)
    begin, end = bounds_of_rank(size, world.rank, world.size)
    windows = _in_source_order(source).window(size, drop_remainder=drop_remainder)
    tagged_rows = windows.flat_map(partial(_tagged_rows, begin, end))
    _require_pure(call, tagged_rows.element_spec[1])
    _require_same(world, source)
    mapped = tagged_rows.map(lambda tag, fields: (tag, call(*fields)), num_parallel_calls)
    # A rank whose share is empty has a row in each batch all the same, which doesn't count.
    are_full = drop_remainder and end > begin
    # The rows of a window become one batch again.
    tagged = mapped.batch(max(end - begin, 1), drop_remainder)
    count = windows.cardinality()
    if count != tf.data.UNKNOWN_CARDINALITY:
        tagged = tagged.apply(tf.data.experimental.assert_cardinality(count))
    return Pipeline(tagged.prefetch(tf.data.AUTOTUNE), are_full)


def _call_with_seed(map: Callable, sample: Any, seed: tf.Tensor) -> Any:
    if isinstance(sample, tuple):
        return map(*sample, seed)
    return map(sample, seed)


def _in_source_order(source: tf.data.Dataset) -> tf.data.Dataset:
    """Return a dataset whose elements have the same order on all ranks."""
    options = tf.data.Options()
    options.deterministic = True
    if source.options().autotune.enabled is None:
        # The thread that tunes sleeps for ever longer times, and the end of an epoch often waits until it wakes up:
        # up to as long as the epoch took, for all ranks if it happens on one. Upstream issue: none.
        options.autotune.enabled = False
    return source.with_options(options)


def _tagged_rows(begin: int, end: int, *window: Any) -> tf.data.Dataset:
    """Return, of the elements of a batch, a dataset of the elements of one rank with their tags."""
    # A tag has two numbers: 1 for a row that counts, 0 for the one row of a rank that would have none; and the checksum
    # of the batch's first element. All batches but the last have the same number of rows on a rank: they can be batched
    # again.
    # Elements come as a dataset of each field, and are tuples of their fields from here on.
    samples = tf.data.Dataset.zip(window)
    total = samples.cardinality()
    row_count = tf.clip_by_value(total - begin, 0, end - begin)
    checksum = checksum_of(samples.take(1).get_single_element())
    tag = tf.stack([tf.cast(row_count > 0, tf.int64), checksum])
    skipped = tf.minimum(tf.constant(begin, tf.int64), total - 1)
    own_samples = samples.skip(skipped).take(tf.maximum(row_count, 1))
    tags = tf.data.Dataset.from_tensors(tag).repeat()
    return tf.data.Dataset.zip((tags, own_samples))


def _with_common_tag(tags: tf.Tensor, rows: Any) -> Any:
    """Return rows with one tag for all of them."""
    # All rows have the mark of their batch.
    count = tf.reduce_sum(tags[:, 0])
    return with_tag(tf.stack([count, tags[0, 1]]), rows)


def _rows_that_count(tags: tf.Tensor, rows: Any) -> Any:
    total = tf.shape(tags)[0]
    count = tf.cast(tf.reduce_sum(tags[:, 0]), tf.int32)
    return run_of(rows, total, 0, count)


def _require_pure(call: Callable, spec: Any) -> None:
    """Raise ValueError for a map whose result depends on more than its arguments."""
    function = tf.function(lambda fields: call(*fields))
    graph = function.get_concrete_function(spec).graph.as_graph_def()
    # Functions called in the map have their operations in the library.
    nodes = list(graph.node)
    for function in graph.library.function:
        nodes += function.node_def
    operations = dict.fromkeys(node.op for node in nodes)
    if random := list(filter(_RANDOM.match, operations)):
        raise ValueError(
            f"the map of a pipeline draws random numbers ({', '.join(random)}), which would differ from those "
            "of one process.\nWhat to do: call npu.distribute.pipeline(…, seed=1). The map then gets a seed for each "
            "sample as its last argument; draw with tf.random.stateless_uniform(shape, seed), or "
            "tf.image.stateless_random_flip_left_right(image, seed)."
        )
    if stateful := list(filter(_STATEFUL.match, operations)):
        raise ValueError(
            f"the map of a pipeline calls Python, or changes a state ({', '.join(stateful)}): several ranks "
            "may get different samples than one.\nWhat to do: use operations of TensorFlow; for Python code whose "
            "result depends only on its arguments, use tf.numpy_function(…, stateful=False). Count or adapt in the "
            "source, which all ranks read; or let each rank read its own part, by npu.distribute.divided."
        )


def _require_same(world: World, source: tf.data.Dataset) -> None:
    """Raise ValueError for a source that has another order or length on each rank, as far as its making tells."""
    seeds = compat.shuffle_seeds(source)
    # Zeros stand for no seed, so that each rank would draw one of its own.
    if any(set(pair) == {0} for pair in seeds):
        raise ValueError(
            "the source of a pipeline is shuffled without a seed, in a different order on each rank.\nWhat to do: "
            "shuffle(…, seed=1), list_files(…, seed=1), or npu.open(seed=1) right after the imports."
        )
    description = [[list(pair) for pair in seeds], int(source.cardinality())]
    descriptions = world.objects(description, "source of a pipeline")
    if len(set(map(repr, descriptions))) > 1:
        lines = world.lines(
            f"length {length}, seeds of shuffle {pairs}" for pairs, length in descriptions
        )
        raise ValueError(
            f"the ranks have different sources for a pipeline (length -1: endless, -2: unknown):\n{lines}\n"
            "What to do: give every rank the whole source, and shuffle the same seed on every rank; pipeline divides "
            "it. For data that are divided already, use npu.distribute.divided."
        )
