"""One rank of the soak: steps that do now and then what jobs do for weeks, and what the process holds after them.

A step depends on its number alone, so that all ranks do the same. ``soak`` sets the number of steps, and judges growth.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from typing import Any, Callable

import tensorflow as tf

import npu_device as npu
from benchmarks.held import Sample, sample
from hccl.manage.api import create_group, destroy_group
from npu_device._src.collectives.group import group_of
from npu_device._src.collectives.job import current
from npu_device._src.collectives.moves import all_gather_v
from npu_device.distribute import hccl_ops

_BATCHES = 50  # of an epoch, at whose end TensorFlow keeps 0.8 KB: an OutOfRangeError leaves a function
_ROWS, _WIDTH = 500, 16
_LONGEST = 5000
_SENT = (1, 1000, 100_000)  # elements
_NEW_FUNCTION_EVERY = 500  # steps; the other numbers likewise, none a multiple of another
_NEW_GROUP_EVERY = 23
_NEW_TAG_EVERY = 3
_VARYING_EVERY = 7
_BROADCAST_EVERY = 51
_MANY = 40  # sums at once, so that TensorFlow's pools of threads become as large as they will ever be
_GROUP_NAMES = 20


class SoakSide:
    """The small model, and the calls that are made beside its steps.

    Args:
        rank: this process's rank; alone, the package is inert and the calls that need others are left out.
        ranks: how many there are.
    """

    def __init__(self, rank: int, ranks: int) -> None:
        tf.config.set_visible_devices([], "GPU")
        npu.open().as_default()
        self._rank = rank
        self._ranks = ranks
        self._shared = current() is not None
        self._dense = tf.Variable(tf.ones([_WIDTH, 8]))
        self._table = tf.Variable(tf.ones([_ROWS, _WIDTH]))
        self._data = self._dataset()
        self._iterator = iter(self._data)
        self._step = self._function()
        self._gather = tf.function(self._gather_all, input_signature=[tf.TensorSpec([None, 2])])

    def run(self, first: int, last: int) -> None:
        """Make the steps from one number up to another, which is not among them."""
        for number in range(first, last):
            self._one(number)

    def sample(self) -> Sample:
        """Return the resources that this process holds."""
        return sample()

    def _one(self, number: int) -> None:
        choice = random.Random(number)
        if number % _NEW_FUNCTION_EVERY == 0:
            self._step = self._function()
            self._new_sums(choice.randrange(1, _LONGEST), 1)
            self._new_sums(_LONGEST, _MANY)  # one length: TensorFlow's backend keeps up to 16 keys of 1 KB for each
            gc.collect()  # by itself, Python does so after some twenty: 90 MB of garbage, and holes in malloc's memory
        loss = self._train()
        npu.distribute.all_reduce(loss, "mean")
        if number % _BROADCAST_EVERY == 0:
            npu.distribute.broadcast([self._dense, self._table])
        if not self._shared:
            return
        if number % _NEW_TAG_EVERY == 0:
            self._send(number, choice.choice(_SENT))
        if number % _VARYING_EVERY == 0:
            rows = tf.ones([choice.randrange(1, _LONGEST) // (self._rank + 1) + 1, 2])
            self._gather(rows)
            self._gather_all(rows)
            self._exchange(choice)
        if number % _NEW_GROUP_EVERY == 0:
            self._group(f"group {number // _NEW_GROUP_EVERY % _GROUP_NAMES}")

    def _dataset(self) -> tf.data.Dataset:
        """Row numbers, another number of them in each batch and on each rank, some of them more than once."""

        def batches() -> Iterator[list[int]]:
            choice = random.Random(self._rank)
            for _ in range(_BATCHES):
                yield [choice.randrange(_ROWS) for _ in range(choice.randrange(1, 100))]

        data = tf.data.Dataset.from_generator(batches, output_signature=tf.TensorSpec([None], tf.int32))
        options = tf.data.Options()
        options.threading.private_threadpool_size = 1
        return data.cache().with_options(options)

    def _train(self) -> tf.Tensor:
        """Return the loss of a step. At the end of the data, which is an error in the step, start the data again."""
        try:
            return self._step(self._iterator)
        except tf.errors.OutOfRangeError:
            self._iterator = iter(self._data)
            return self._step(self._iterator)

    def _function(self) -> Callable[[Any], tf.Tensor]:
        """Return a training step that has not been traced yet: a dense and a sparse gradient."""

        @tf.function
        def step(iterator: Any) -> tf.Tensor:
            numbers = next(iterator)
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.gather(self._table, numbers) @ self._dense)
            gradients = tape.gradient(loss, [self._dense, self._table])
            dense, rows = npu.distribute.all_reduce(gradients, "mean")
            self._dense.assign_sub(1e-6 * dense)
            self._table.scatter_sub(tf.IndexedSlices(1e-6 * rows.values, rows.indices))
            return loss

        return step

    @staticmethod
    def _new_sums(length: int, count: int) -> None:
        """Trace a function that makes sums, none of which waits for another; call it once, and drop it."""

        @tf.function
        def totals(values: tf.Tensor) -> list[tf.Tensor]:
            return [npu.distribute.all_reduce(values + number, "sum") for number in range(count)]

        totals(tf.ones([length]))

    def _send(self, tag: int, length: int) -> None:
        """From an even rank to the next one, or back."""
        peer = self._rank ^ 1
        if peer >= self._ranks:
            return
        if (self._rank + tag) % 2 == 0:
            hccl_ops.send(tf.ones([length]), tag, peer)
        else:
            hccl_ops.receive([length], tf.float32, tag, peer)

    @staticmethod
    def _gather_all(rows: tf.Tensor) -> tf.Tensor:
        running = current()
        assert running is not None
        return all_gather_v(running, rows, group_of(running, "hccl_world_group"))

    def _exchange(self, choice: random.Random) -> None:
        """Run an all-to-all with other lengths each time."""
        counts = [[choice.randrange(100) for _ in range(self._ranks)] for _ in range(self._ranks)]
        sent, received = counts[self._rank], [row[self._rank] for row in counts]
        starts = [[sum(lengths[:rank]) for rank in range(self._ranks)] for lengths in (sent, received)]
        hccl_ops.all_to_all_v(tf.ones([sum(sent)]), sent, starts[0], received, starts[1])

    def _group(self, name: str) -> None:
        create_group(name, self._ranks, list(range(self._ranks)))
        npu.distribute.all_reduce(tf.ones([100]), "sum", group=name)
        destroy_group(name)
