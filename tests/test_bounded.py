"""Checks that what a job holds doesn't grow with what it has done: keys, graphs, tags, groups."""

from __future__ import annotations

import ctypes
import gc
import os
import threading
import weakref
from typing import Any, Callable

import pytest
import tensorflow as tf
from collective_bodies import all_to_all, group, in_graph
from pool import Pool

import npu_device as npu
from hccl.manage.api import create_group, destroy_group
from npu_device._src.collectives import graph
from npu_device._src.collectives.engines.tensorflow.kernels import RING
from npu_device._src.collectives.moves import all_gather_v
from npu_device._src.collectives.ops import all_reduce, broadcast
from npu_device.distribute import hccl_ops


def _held() -> tuple[int, int, int]:
    """Descriptors, threads, and mappings of memory of this package."""
    gc.collect()
    with open("/proc/self/maps", encoding="utf-8") as maps:
        mappings = sum("memfd:npu_device" in line for line in maps)
    return len(os.listdir("/proc/self/fd")), threading.active_count(), mappings


class _Allocated(ctypes.Structure):
    """What glibc's ``mallinfo2`` returns."""

    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in _names.split()]


def body_new_numbers() -> int:
    """Return by how much 200 sums of new numbers grow what malloc has given out; the median of three such series,
    because other threads of TensorFlow take and return memory when they like.
    """
    look = ctypes.CDLL(None).mallinfo2
    look.restype = _Allocated
    held = []
    for begin, end in ((0, 100), (100, 300), (300, 500), (500, 700)):
        for number in range(begin, end):
            npu.distribute.all_reduce(number / 7)
        gc.collect()
        held.append(int(look().uordblks))
    return sorted(after - before for before, after in zip(held, held[1:]))[1]


@pytest.mark.once
@pytest.mark.both_engines
def test_new_python_numbers_take_no_memory(two_ranks: Pool) -> None:
    # TensorFlow kept 0.7 KB for each: 140 KB.
    assert max(two_ranks.run(body_new_numbers)) < 60 << 10


def body_rings(calls: int) -> tuple[list[float], int, int]:
    """Return sums of one function, more of a kind than there are keys; and how many rings of keys these take, and the
    second half of calls of other lengths.
    """
    job, mine = group("world")
    rank, size, drawn = (
        mine.rank,
        mine.size,
        job.engines.tensorflow.kernels.sequence_of(mine)._drawn,
    )
    before = len(drawn)
    sums = in_graph(
        lambda value: [
            all_reduce(job, value + float(n), "sum", mine)[-1] for n in range(2 * RING + 1)
        ]
    )
    for _ in range(3):
        found = [float(one) for one in sums(tf.zeros([1357]))]
    of_sums = len(drawn) - before
    gather = in_graph(
        lambda rows: all_gather_v(job, rows, mine), input_signature=[tf.TensorSpec([None, 3])]
    )
    rings = []
    for number in range(calls):
        lengths = [1000 + 7 * (number + other) for other in range(size)]
        rows = tf.fill([lengths[rank], 3], float(rank))
        for gathered in (gather(rows), all_gather_v(job, rows, mine)):
            ends = [sum(lengths[: other + 1]) for other in range(size)]
            assert gathered.shape == [ends[-1], 3]
            assert [gathered.numpy()[end - 1, 2] for end in ends] == list(range(size))
        matrix = [[number + 500 + other] * size for other in range(size)]
        exchanged = hccl_ops.alltoallvc(tf.fill([sum(matrix[rank])], rank), matrix, rank)
        assert exchanged.shape == [sum(row[rank] for row in matrix)]
        rings.append(len(drawn))
    return found, of_sums, rings[-1] - rings[calls // 2]


@pytest.mark.slow
@pytest.mark.parametrize("tensorflow_ranks", [2], indirect=True)
def test_calls_without_end_take_one_ring_of_keys(tensorflow_ranks: Pool) -> None:
    for sums, rings, of_lengths in tensorflow_ranks.run(body_rings, 20):
        assert sums == [2 * number for number in range(33)]
        assert rings == 1
        assert (
            of_lengths <= 3
        )  # where each length took keys of its own, 30 more for the ten of the second half


def body_graphs(known: bool) -> tuple[dict[str, int], int, int]:
    """Return how many graphs of retraced functions stay, by what they call, with ``known`` shapes or unknown ones; and
    how many Python functions these called, and how many of them stay.
    """
    job, mine = group("world")
    gc.collect()
    before, called = set(graph.functions_by_id), set()

    def lists(values: list[tf.Tensor]) -> Any:
        slices = tf.IndexedSlices(values[0][tf.newaxis], tf.constant([0]), tf.constant([4, 8]))
        return npu.distribute.all_reduce([*values, slices])

    def gradients(values: list[tf.Tensor]) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(values)
            summed = npu.distribute.all_reduce(values, "sum")
        return tape.gradient(summed, values)

    def branch(values: list[tf.Tensor]) -> Any:
        return tf.cond(
            values[0][0] > 0, lambda: npu.distribute.all_reduce(values, "sum"), lambda: values
        )

    def loop(values: list[tf.Tensor]) -> Any:
        return tf.while_loop(
            lambda *_: True,
            lambda *now: npu.distribute.all_reduce(list(now), "mean"),
            values,
            maximum_iterations=2,
        )

    def nested(values: list[tf.Tensor]) -> Any:
        inner = tf.function(
            lambda value: npu.distribute.all_reduce([value, value[:1]])[0]
        )  # gone when it is called
        return tf.while_loop(
            lambda step, _: step < 2, lambda step, value: (step + 1, inner(value)), (0, values[0])
        )

    def others(values: list[tf.Tensor]) -> Any:
        sent = all_to_all(job, tf.tile(values[1], [mine.size]), mine)
        return [sent, all_gather_v(job, values[1], mine), broadcast(job, values, 0, mine)]

    def alive_after(call: Any) -> int:
        graphs = []

        def trace() -> None:
            def step(values: list[tf.Tensor]) -> Any:
                graphs.append(weakref.ref(tf.compat.v1.get_default_graph()))
                return call(values)

            values = [tf.ones([8]), tf.ones([3000])]
            shapes = [tf.TensorSpec(value.shape if known else [None]) for value in values]
            made = in_graph(step, input_signature=[shapes])
            for _ in range(2):
                if call in (gradients, branch, others):
                    with tf.GradientTape() as tape:
                        tape.watch(values)
                        results = made(values)
                    called.update(graph.functions_by_id)
                    tape.gradient(results, values)
                    del tape, results
                made(values)
                called.update(graph.functions_by_id)
                gc.collect()

        for _ in range(2):
            trace()
        gc.collect()
        return sum(one() is not None for one in graphs)

    alive = {
        call.__name__: alive_after(call)
        for call in (lists, gradients, branch, loop, nested, others)
    }
    return alive, len(called - before), len(set(graph.functions_by_id) - before)


@pytest.mark.once
@pytest.mark.both_engines
def test_graphs_that_are_traced_anew_are_released(two_ranks: Pool, engine: str) -> None:
    for alive, called, left in two_ranks.run(body_graphs, engine == "tensorflow"):
        assert max(alive.values()) <= 1, alive  # TensorFlow keeps the latest
        assert left <= 20 < called


def body_tags_and_groups(tags: int, length: int, groups: int) -> list[bool]:
    """Return whether nothing more is held after many tags, and groups, than after a few. What an earlier test of the
    pool left may end in between, so fewer of a kind are right, too.
    """
    rank, size = npu.distribute.rank(), npu.distribute.size()

    def exchange(value: float, tag: int, where: str = "hccl_world_group") -> None:
        if rank == 0:
            hccl_ops.send(tf.fill([length], value), tag, 1, where)
        elif rank == 1:
            assert hccl_ops.receive([length], tf.float32, tag, 0, where).numpy()[0] == value

    def bounded(rounds: int, call: Callable[[int], None]) -> bool:
        held = []
        for number in range(rounds):
            call(number)
            if number in (rounds // 2, rounds - 1):
                npu.distribute.all_reduce(tf.ones([]))  # nobody is in a group any more
                held.append(_held())
        # Up to four idle connections of a pair come and go; the rounds in between, from 5 on, would leave more.
        return all(late <= early + 4 for early, late in zip(*held))

    def in_group(number: int) -> None:
        name = "again" if number % 2 else f"number {number}"
        create_group(name, size, list(range(size)))
        # Another length each time: what TensorFlow remembers of the group's keys must still hold.
        reduced = npu.distribute.all_reduce(tf.ones([100_000 + number]), "sum", group=name)
        assert reduced.numpy()[-1] == size
        exchange(float(number), 0, name)
        destroy_group(name)

    return [bounded(tags, lambda tag: exchange(float(tag), tag)), bounded(groups, in_group)]


@pytest.mark.both_engines
@pytest.mark.parametrize(("tags", "length", "groups"), [(600, 1, 40), (40, 300_000, 12)])
def test_many_tags_and_groups_leave_nothing_behind(
    several_ranks: Pool, tags: int, length: int, groups: int
) -> None:
    assert (
        several_ranks.run(body_tags_and_groups, tags, length, groups)
        == [[True, True]] * several_ranks.size
    )
