"""Shared by the collectives' tests: the ranks' values, their groups, and numpy's results."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from npu_device._src.collectives.engines.host import sockets
from npu_device._src.collectives.group import WORLD_GROUP, Group
from npu_device._src.collectives.job import current
from npu_device._src.collectives.moves import all_to_all_v
from npu_device._src.training.opening import device

FLOATS = ("float16", "bfloat16", "float32", "float64")
INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
REDUCTIONS = {"sum": np.sum, "mean": np.mean, "min": np.min, "max": np.max, "prod": np.prod}


def values(rank: int, shape: tuple[int, ...]) -> np.ndarray:
    """Small whole numbers, different on each rank."""
    return (np.arange(np.prod(shape)).reshape(shape) % 5 + 3 * rank + 1).astype(np.float64)


def members(size: int, rank: int, kind: str) -> tuple[int, ...]:
    """World ranks of the group of a rank: everybody's, or one of two groups of the same name on disjoint ranks."""
    if kind == "world":
        return tuple(range(size))
    return tuple(other for other in range(size) if other % 2 == rank % 2)


def group(kind: str) -> Any:
    """The group of this rank, and the running cluster."""
    job = device.running_job()
    assert job is not None
    rank = job.cluster.rank
    ranks = members(job.cluster.world_size, rank, kind)
    return job, Group(WORLD_GROUP if kind == "world" else "parity", ranks, ranks.index(rank))


def all_to_all(job: Any, tensor: Any, mine: Any) -> Any:
    """``all_to_all_v`` of equal blocks of the first dimension."""
    counts = tf.fill([mine.size], tf.size(tensor) // mine.size)
    places = tf.cumsum(counts, exclusive=True)
    moved = all_to_all_v(job, tf.reshape(tensor, [-1]), counts, places, counts, places, mine)
    return tf.ensure_shape(tf.reshape(moved, tf.shape(tensor)), tensor.shape)


def wrong_refusals(*cases: tuple[Any, ...]) -> list[str]:
    """Call what is to be refused, and return the answers that are others. Each case is how the error begins, with its
    type, what else it says, the call, and its arguments.
    """
    wrong = []
    for begin, says, call, *arguments in cases:
        try:
            answer = f"accepted: {call(*arguments)}"
        except Exception as error:
            answer = f"{type(error).__name__}: {error}"
        if not answer.startswith(begin) or says not in answer:
            wrong.append(f"expected {begin} … {says}; found {answer}")
    return wrong


@contextlib.contextmanager
def small_data_in_messages() -> Iterator[int]:
    """Let messages carry small data on TensorFlow's engine, as for users; the pools' ranks send all data through it.
    Yield the largest size of a rank's data in a message, in bytes.
    """

    job = current()

    def let(most: int) -> None:
        job.most_message_bytes = most
        for group, queue in job.engines.messages.queues.items():
            if queue.channel is not None:
                queue.channel.slot_bytes = sockets.room(job, group.size)

    usual = job.most_message_bytes
    let(1024)
    try:
        yield job.most_message_bytes
    finally:
        let(usual)


def in_graph(function: Any, **options: Any) -> Any:
    """A ``tf.function`` that doesn't rewrite the package's Python code, as it doesn't behind the public calls: that
    would take most of the time.
    """
    return tf.function(function, autograph=False, **options)


def as_they_are(*functions: Any) -> Any:
    """The package's functions for a ``tf.function`` that rewrites its own loops, but not them: see ``in_graph``."""
    return map(tf.autograph.experimental.do_not_convert, functions)


def counts(size: int) -> np.ndarray:
    """Elements that rank i sends to rank j: some none, all different enough to notice a mistake."""
    return np.array([[(i + 2 * j) % 4 for j in range(size)] for i in range(size)])


def apart(lengths: np.ndarray) -> np.ndarray:
    """Displacements of blocks that lie in reverse order with one element between them."""
    backwards = np.concatenate([[0], np.cumsum(lengths[::-1] + 1)[:-1]])
    return backwards[::-1]
