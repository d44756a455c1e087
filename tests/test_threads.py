"""Calls that have no order: two threads of a rank, for which one group is an error and a group each works; and places
where TensorFlow runs calls in any order, and a collective is refused on every rank, with the remedy.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Callable

import job
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
    threads = [
        threading.Thread(target=run, args=(number,), name=name) for number, name in enumerate(names)
    ]
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
        wrong += bool(
            np.any(reduced.numpy() != size * (1000 * number + step) + size * (size - 1) / 2)
        )
    return wrong


def body_one_group(elements: int, kind: str, rounds: int) -> tuple[list[str], int]:
    """The errors of two threads that reduce in one group, a few times, and how many sums were wrong."""
    ended: list[Any] = []
    for _ in range(rounds):
        if kind == "pooled":
            with ThreadPoolExecutor(2) as pool:
                futures = [
                    pool.submit(_sums, "hccl_world_group", number, elements) for number in range(2)
                ]
            ended += [future.exception() or future.result() for future in futures]
        else:
            ended += _in_threads(
                lambda number: _sums("hccl_world_group", number, elements), kind == "named"
            )
    errors = [f"{type(error).__name__}: {error}" for error in ended if isinstance(error, Exception)]
    return errors, sum(wrong for wrong in ended if not isinstance(wrong, Exception))


@pytest.mark.both_backends
@pytest.mark.parametrize("rounds", [5, pytest.param(200, marks=pytest.mark.full)])
@pytest.mark.parametrize("elements, kind", [(1 << 18, "named"), (3, "unnamed"), (3, "pooled")])
def test_one_group_of_two_threads_is_refused(
    several_ranks: Pool, elements: int, kind: str, rounds: int
) -> None:
    # A thread whose counterparts all go on is alone with them, once the others have been refused.
    names = {
        "named": "'trainer ",
        "unnamed": "in thread 'Thread",
        "pooled": "in thread 'ThreadPoolExecutor'",
    }
    for errors, wrong in several_ranks.run(body_one_group, elements, kind, rounds, timeout=300):
        assert wrong == 0
        first = errors[0]
        assert first.startswith("MismatchError") and names[kind] in first
        for rank in range(several_ranks.size):
            assert f"rank {rank} on host" in first
        assert (
            "What to do: give each thread a group of its own (hccl.manage.api.create_group)"
            in first
        )


IN_FUNCTIONS = """
import os, sys, threading
import npu_device as npu

npu.open().as_default()
import tensorflow as tf

size, found = npu.distribute.size(), []
step = tf.function(lambda x: npu.distribute.all_reduce([x, x[:3]], "sum"))
step(tf.ones([1000]))

def work(value):
    try:
        for _ in range(20):
            total, part = step(tf.fill([1000], value))
            if {*total.numpy(), *part.numpy()} != {size * value}:
                found.append(f"wrong: {total[0]}")
    except Exception as error:
        found.append("refused" if "MismatchError: the ranks of group" in str(error) else f"{error}")

threads = [threading.Thread(target=work, args=(float(value),)) for value in (1, 100)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print("ended", *found, flush=True)
os._exit(0)  # the job has failed
"""
_SOCKETS = {"NPU_DEVICE_SHARED_MEMORY": "off"}


@pytest.mark.parametrize(
    "environment",
    [
        {},
        pytest.param({**_SOCKETS, "NPU_DEVICE_BACKEND": "tcp"}, id="tcp"),
        pytest.param(
            {**_SOCKETS, "NPU_DEVICE_BACKEND": "tensorflow"},
            marks=pytest.mark.full,
            id="tensorflow",
        ),
    ],
)
def test_two_threads_that_call_one_function_are_refused(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    for output in job.outputs(tmp_path, 2, IN_FUNCTIONS, **environment):
        [ended] = [line.split()[1:] for line in output.splitlines() if line.startswith("ended")]
        assert set(ended) <= {"refused"}, (
            output
        )  # nothing if one thread ends before the other begins


def body_one_after_the_other() -> list[Any]:
    """Threads that reduce in turns: each after the one before, in one pool, beside others that do something else."""
    # Python's own names are numbers of a process: rank 0 has had more threads than the others.
    for _ in range(3 - npu.open().worker_id):
        threading.Thread(target=int).start()
    ended: list[Any] = []
    step = tf.function(lambda x: npu.distribute.all_reduce(x, "sum"))

    def run(number: int) -> None:
        ended.append(_sums("hccl_world_group", number, 3))
        ended.append(float(_in_loop(step)) - npu.distribute.size() ** 3)

    for number in range(3):
        thread = threading.Thread(target=run, args=(number,))
        thread.start()
        thread.join(60)
    begin, end = threading.Event(), threading.Event()
    with ThreadPoolExecutor(3) as pool:
        pool.submit(end.wait, 60)
        pool.submit(lambda: (begin.set(), end.wait(60)))
        begin.wait(60)
        pool.submit(run, 3).result(60)
        end.set()
    turns = [threading.Event(), threading.Event()]

    def take_turns(number: int) -> None:
        for _ in range(3):
            turns[number].wait(60)
            turns[number].clear()
            ended.append(float(step(tf.constant(1.0))) - npu.distribute.size())
            turns[1 - number].set()

    turns[0].set()
    _in_threads(take_turns)
    return ended


def _in_loop(step: Any) -> tf.Tensor:
    """A function that is called in a loop of another one."""

    @tf.function
    def thrice() -> tf.Tensor:
        value = tf.constant(1.0)
        for _ in tf.range(3):
            value = step(value)
        return value

    return thrice()


@pytest.mark.both_backends
def test_threads_one_after_the_other(several_ranks: Pool) -> None:
    assert several_ranks.run(body_one_after_the_other) == [[0] * 14] * several_ranks.size


def body_a_group_each(elements: int, pooled: bool = False) -> list[Any]:
    size = npu.open().workers_num
    for number in range(2):
        create_group(f"thread {number}", size, list(range(size)))
    if pooled:
        with ThreadPoolExecutor(2) as pool:
            wrong = list(
                pool.map(lambda number: _sums(f"thread {number}", number, elements), range(2))
            )
    else:
        wrong = _in_threads(lambda number: _sums(f"thread {number}", number, elements))
    for number in range(2):
        destroy_group(f"thread {number}")
    return wrong


@pytest.mark.both_backends
def test_a_group_for_each_thread_of_a_pool(several_ranks: Pool) -> None:
    assert several_ranks.run(body_a_group_each, 3, True) == [[0, 0]] * several_ranks.size


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
    return (
        _in_threads(lambda number: call(number if rank == 0 else 1 - number))
        if rank < 2
        else [0, 0]
    )


@pytest.mark.both_backends
@pytest.mark.parametrize("elements", [3, 1 << 18])
@pytest.mark.parametrize("body", [body_a_group_each, body_a_tag_each])
def test_a_group_or_a_tag_for_each_thread(
    several_ranks: Pool, body: Callable[[int], Any], elements: int
) -> None:
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
        "map": lambda: next(
            iter(tf.data.Dataset.range(3).map(lambda each: add(tf.cast(each, tf.float32))))
        ),
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
        assert (
            found.pop("map_fn")
            == found.pop("a scope of that name")
            == str([1.0 * total, 2.0 * total])
        )
        weight = 2.0 * several_ranks.size * (rank + 1)
        assert found.pop("jacobian in a loop") == str([[weight, 0.0], [0.0, 2 * weight]])
        for name, text in found.items():
            assert text.startswith("RuntimeError") and "another order on each rank" in text, (
                name,
                text,
            )
