"""Calls that have no order: two threads of a rank, for which one group is an error and a group each works; and places
where TensorFlow runs calls in any order, and a collective is refused on every rank, with the remedy.
"""

from __future__ import annotations

import threading
from typing import Any, Callable

import numpy as np
import pytest
import tensorflow as tf
from pool import Pool

import npu_device as npu
from hccl.manage.api import create_group, destroy_group
from npu_device.distribute import hccl_ops

CALLS = 50


def _in_threads(call: Callable[[int], Any], named: bool = True) -> list[Any]:
    """``call(0)`` and ``call(1)`` in a thread each; what they return, or the error that they raise."""
    ended: list[Any] = [None, None]

    def run(number: int) -> None:
        try:
            ended[number] = call(number)
        except Exception as error:
            ended[number] = error

    names = [f"trainer {number}" if named else None for number in range(2)]
    threads = [threading.Thread(target=run, args=(number,), name=name) for number, name in enumerate(names)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return ended


def _sums(group: str, number: int, elements: int) -> int:
    """Return how many of some sums are wrong."""
    rank, size = npu.open().worker_id, npu.open().workers_num
    wrong = 0
    for step in range(CALLS):
        mine = tf.fill([elements], float(1000 * number + step + rank))
        reduced = npu.distribute.all_reduce(mine, "sum", group=group)
        wrong += bool(np.any(reduced.numpy() != size * (1000 * number + step) + size * (size - 1) / 2))
    return wrong


def body_one_group(elements: int, named: bool) -> tuple[list[str], list[int]]:
    begin = threading.Barrier(2)

    def call(number: int) -> int:
        begin.wait()
        return _sums("hccl_world_group", number, elements)

    ended = _in_threads(call, named)
    errors = [f"{type(error).__name__}: {error}" for error in ended if isinstance(error, Exception)]
    return errors, [wrong for wrong in ended if not isinstance(wrong, Exception)]


@pytest.mark.both_backends
@pytest.mark.parametrize("elements, named", [(1 << 18, True), (3, False)])
def test_one_group_of_two_threads_is_refused(several_ranks: Pool, elements: int, named: bool) -> None:
    # A thread whose counterparts all go on is alone with them, once the others have been refused.
    for errors, wrong in several_ranks.run(body_one_group, elements, named, timeout=90):
        assert wrong in ([], [0])
        first = errors[0]
        assert first.startswith("MismatchError")
        assert ("'trainer 0'" in first or "'trainer 1'" in first) if named else "in thread 'Thread" in first
        for rank in range(several_ranks.size):
            assert f"rank {rank} on host" in first
        assert "What to do: give each thread a group of its own (hccl.manage.api.create_group)" in first


def body_one_after_the_other() -> list[Any]:
    # Python's own names are numbers of a process: rank 0 has had more threads than the others.
    for _ in range(3 - npu.open().worker_id):
        threading.Thread(target=int).start()
    ended: list[Any] = []
    for number in range(3):
        thread = threading.Thread(target=lambda number=number: ended.append(_sums("hccl_world_group", number, 3)))
        thread.start()
        thread.join(60)
    return ended


@pytest.mark.both_backends
def test_threads_without_a_name_one_after_the_other(several_ranks: Pool) -> None:
    assert several_ranks.run(body_one_after_the_other) == [[0, 0, 0]] * several_ranks.size


def body_a_group_each(elements: int) -> list[Any]:
    size = npu.open().workers_num
    for number in range(2):
        create_group(f"thread {number}", size, list(range(size)))
    wrong = _in_threads(lambda number: _sums(f"thread {number}", number, elements))
    for number in range(2):
        destroy_group(f"thread {number}")
    return wrong


def body_a_tag_each(elements: int) -> list[int]:
    rank = npu.open().worker_id

    def call(number: int) -> int:
        wrong = 0
        for step in range(CALLS):
            if rank == 0:
                hccl_ops.send(tf.fill([elements], float(1000 * number + step)), number, 1)
            else:
                received = hccl_ops.receive([elements], tf.float32, number, 0)
                wrong += float(tf.reduce_max(received)) != 1000 * number + step
        return wrong

    # The thread of one name sends with one tag and receives with the other.
    return _in_threads(lambda number: call(number if rank == 0 else 1 - number)) if rank < 2 else [0, 0]


@pytest.mark.both_backends
@pytest.mark.parametrize("elements", [3, 1 << 18])
@pytest.mark.parametrize("body", [body_a_group_each, body_a_tag_each])
def test_a_group_or_a_tag_for_each_thread(several_ranks: Pool, body: Callable[[int], Any], elements: int) -> None:
    assert several_ranks.run(body, elements, timeout=90) == [[0, 0]] * several_ranks.size


def body_unordered(graph: bool) -> dict[str, str]:
    value = tf.constant([1.0, 2.0]) * (npu.distribute.rank() + 1)

    def add(each: Any) -> Any:
        return npu.distribute.all_reduce(each, "sum")

    def jacobian(pfor: bool) -> Any:
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(value)
            result = add(value**2)
        return tape.jacobian(result, value, experimental_use_pfor=pfor)

    def in_scope() -> Any:
        with tf.name_scope("loop_body"):
            return add(value)

    places = {
        "vectorized_map": lambda: tf.vectorized_map(add, value),
        "jacobian": lambda: jacobian(True),
        "map": lambda: next(iter(tf.data.Dataset.range(3).map(lambda each: add(tf.cast(each, tf.float32))))),
        "nested": lambda: next(iter(tf.data.Dataset.range(3).map(tf.function(add)))),
        "map_fn": lambda: tf.map_fn(add, value),
        "jacobian in a loop": lambda: jacobian(False),
        "a scope of that name": in_scope,
    }

    found = {}
    for name, call in places.items():
        try:
            found[name] = str((tf.function(call) if graph else call)().numpy().tolist())
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


@pytest.mark.both_backends
@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
def test_collectives_where_calls_have_no_order(several_ranks: Pool, graph: bool) -> None:
    total = sum(range(1, several_ranks.size + 1))
    for rank, found in enumerate(several_ranks.run(body_unordered, graph)):
        assert found.pop("map_fn") == found.pop("a scope of that name") == str([1.0 * total, 2.0 * total])
        weight = 2.0 * several_ranks.size * (rank + 1)
        assert found.pop("jacobian in a loop") == str([[weight, 0.0], [0.0, 2 * weight]])
        for name, text in found.items():
            assert text.startswith("RuntimeError") and "another order on each rank" in text, (name, text)
