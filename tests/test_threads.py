"""Calls that have no order: two threads of a rank, for which one group is an error and a group each works; and places
where TensorFlow runs calls in any order, and a collective is refused on every rank, with the remedy.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import multiprocessing.pool
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any, Callable

import numpy as np
import pytest
import tensorflow as tf
from mpi_ranks import MpiPool
from pool import Pool
from ranks import all_through

import npu_device as npu
from hccl.manage.api import create_group, destroy_group
from npu_device._src.collectives.job import current
from npu_device._src.pools.pool import Pool as PlainPool
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


@pytest.mark.both_engines
@pytest.mark.parametrize("rounds", [5, pytest.param(200, marks=pytest.mark.full)])
@pytest.mark.parametrize("elements, kind", [(1 << 18, "named"), (3, "unnamed"), (3, "pooled")])
def test_one_group_of_two_threads_is_refused(
    several_ranks: Pool, elements: int, kind: str, rounds: int
) -> None:
    # A thread whose counterparts all go on is alone with them, once the others have been refused.
    names = {
        "named": "'trainer ",
        "unnamed": "in thread 'Thread",
        "pooled": "in thread 'ThreadPoolExecutor (",
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
        assert "same name on all ranks" in first


def _start_in_other_order(kind: str, rank: int, run: Callable[[float], Any]) -> None:
    """Run two calls in threads that start in another order on each rank, and wait for both."""
    values = [1.0, 100.0] if rank % 2 == 0 else [100.0, 1.0]
    if kind == "pooled":
        # The second thread of the pool gets its work late.
        late = itertools.count()
        with ThreadPoolExecutor(2, initializer=lambda: time.sleep(next(late) / 10)) as pool:
            list(pool.map(run, values))
        return
    queue: SimpleQueue[float] = SimpleQueue()
    threads = []
    for value in values:
        queue.put(value)
        if kind == "timers":
            thread = threading.Timer(0.01, run, [value])
        elif kind == "queue":
            thread = threading.Thread(target=lambda: run(queue.get()))
        else:
            thread = threading.Thread(target=run, args=(value,))
        thread.start()
        threads.append(thread)
        time.sleep(0.05)
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


def body_other_order(kind: str, rounds: int) -> tuple[list[str], list[float]]:
    """The errors of threads that start in another order on each rank, and their wrong sums."""
    rank, size = npu.distribute.rank(), npu.distribute.size()
    errors: list[str] = []
    wrong: list[float] = []

    def run(value: float) -> None:
        try:
            for _ in range(5):
                total = float(npu.distribute.all_reduce(tf.fill([4], value), "sum")[0])
                if total != size * value:
                    wrong.append(total)
                time.sleep(0.02)
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")

    for _ in range(rounds):
        _start_in_other_order(kind, rank, run)
    return errors, wrong


@pytest.mark.both_engines
@pytest.mark.parametrize("rounds", [3, pytest.param(200, marks=pytest.mark.full)])
@pytest.mark.parametrize("kind", ["threads", "timers", "queue", "pooled"])
def test_threads_that_start_in_another_order(several_ranks: Pool, kind: str, rounds: int) -> None:
    for errors, wrong in several_ranks.run(body_other_order, kind, rounds, timeout=400):
        assert wrong == []
        assert errors[0].startswith("MismatchError")
        assert "What to do: give each thread a group of its own" in errors[0]
        assert "need names (threading.Thread(name=…))" in errors[0]


class _Worker(threading.Thread):
    """A thread that runs a function with an argument that isn't one of ``Thread``."""

    def __init__(self, function: Callable[[Any], Any], argument: Any) -> None:
        super().__init__()
        self.function = function
        self.argument = argument

    def run(self) -> None:
        self.function(self.argument)


def body_single_threads(kind: str) -> list[Any]:
    """Threads that start one after the other, and get arguments that differ among the ranks."""
    rank, size = npu.distribute.rank(), npu.distribute.size()
    step = tf.function(lambda x: npu.distribute.all_reduce(x, "sum"))
    sums: list[Any] = []

    def run(argument: Any) -> None:
        try:
            sums.append(float(npu.distribute.all_reduce(tf.constant(1.0), "sum")))
            sums.append(float(step(tf.constant(1.0))))
        except Exception as error:
            sums.append(str(error))

    arguments: list[Any] = [rank, f"shard-{rank}", tf.fill([1 << 12], rank), object(), [], 1.0]
    for argument in arguments:
        _run_in_one_thread(kind, run, argument)
    return [sums, size * 1.0, len(arguments)]


def _run_in_one_thread(kind: str, run: Callable[[Any], Any], argument: Any) -> None:
    if kind == "pooled":
        with ThreadPoolExecutor(2) as pool:
            pool.submit(run, argument).result(60)
    elif kind == "pool of multiprocessing":
        with multiprocessing.pool.ThreadPool(3) as pool:
            pool.map(run, [argument])
    else:
        threads = {
            "threads": threading.Thread(target=run, args=(argument,)),
            "methods": threading.Thread(target=_Worker(run, argument).run),
            "lambdas": threading.Thread(target=lambda: run(argument)),
            "subclass": _Worker(run, argument),
            "timers": threading.Timer(0.01, run, [argument]),
        }
        threads[kind].start()
        while threads[kind].is_alive():  # the main thread could start others
            time.sleep(0.01)


@pytest.mark.both_engines
@pytest.mark.parametrize(
    "kind",
    ["threads", "methods", "lambdas", "subclass", "timers", "pooled", "pool of multiprocessing"],
)
def test_single_threads_with_other_arguments_on_each_rank(several_ranks: Pool, kind: str) -> None:
    for sums, total, threads in several_ranks.run(body_single_threads, kind, timeout=60):
        assert sums == [total] * 2 * threads


def body_works_of_pools(rounds: int) -> list[Any]:
    """Works that pools get one after the other, in whichever of their threads, and in pools of their own."""
    sums: list[Any] = []

    def run(number: int) -> None:
        sums.append(float(npu.distribute.all_reduce(tf.constant(1.0), "sum")))

    for _ in range(rounds):
        with multiprocessing.pool.ThreadPool(3) as pool:
            for number in range(3):
                pool.map(run, [number])
        with ThreadPoolExecutor(3) as executor:
            for number in range(3):
                executor.submit(run, number).result(60)
    return sums


@pytest.mark.both_engines
@pytest.mark.parametrize("rounds", [20, pytest.param(200, marks=pytest.mark.full)])
def test_works_of_pools_one_after_the_other(several_ranks: Pool, rounds: int) -> None:
    size = several_ranks.size
    assert (
        several_ranks.run(body_works_of_pools, rounds, timeout=200) == [[size] * 6 * rounds] * size
    )


def body_a_group_each_in_other_order(kind: str) -> list[Any]:
    """Unnamed threads with a group each, of which one starts first on some ranks and the other one on the others."""
    rank, size = npu.distribute.rank(), npu.distribute.size()
    for value in (1, 100):
        create_group(f"value {value}", size, list(range(size)))
    wrong: list[Any] = []

    def run(value: float) -> None:
        try:
            reduce(value)
        except Exception as error:
            wrong.append(str(error))

    def reduce(value: float) -> None:
        for _ in range(CALLS):
            mine = tf.fill([4], value)
            total = float(npu.distribute.all_reduce(mine, "sum", group=f"value {value:.0f}")[0])
            wrong.extend([total] * (total != size * value))

    _start_in_other_order(kind, rank, run)
    for value in (1, 100):
        destroy_group(f"value {value}")
    return wrong


@pytest.mark.both_engines
@pytest.mark.parametrize("kind", ["threads", "timers", "queue", "pooled"])
def test_a_group_for_each_thread_that_starts_in_another_order(
    several_ranks: Pool, kind: str
) -> None:
    assert several_ranks.run(body_a_group_each_in_other_order, kind) == [[]] * several_ranks.size


def body_one_function(run: int) -> tuple[list[str], list[float]]:
    """Call one function in two threads; return their errors, and the wrong sums."""
    rank, size = npu.distribute.rank(), npu.distribute.size()
    errors: list[str] = []
    wrong: list[float] = []
    elements = (3, 1000, 1 << 16)[run % 3]
    step = tf.function(lambda x: npu.distribute.all_reduce([x, x[:3]], "sum"))
    if run % 4 < 2:  # else one of the threads traces it
        step(tf.ones([elements]))

    # Threads that started one after the other might not overlap.
    begin = threading.Barrier(2)

    def call(value: float) -> None:
        begin.wait(60)
        try:
            for _ in range(20):
                total, part = step(tf.fill([elements], value))
                sums = {*total.numpy().tolist(), *part.numpy().tolist()}
                wrong.extend(sums - {size * value})
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")

    is_other_order = run % 2 and rank
    values = (1.0, 100.0) if is_other_order else (100.0, 1.0)
    threads = [threading.Thread(target=call, args=(value,)) for value in values]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return errors, wrong


_ALL_BUT_MPI = ("shared_memory", "tcp", "tensorflow")
_MPI = pytest.param(
    "mpi",
    200,
    marks=[
        pytest.mark.full,
        pytest.mark.skipif(importlib.util.find_spec("mpi4py") is None, reason="needs mpi4py"),
    ],
)
_ENGINES = [
    ("shared_memory", 2),
    ("tcp", 2),
    *(pytest.param(engine, 200, marks=pytest.mark.full) for engine in _ALL_BUT_MPI),
    _MPI,
]


def _ranks_of(engine: str) -> Any:
    """Return two new ranks, all of whose tensors go through an engine."""
    ranks = MpiPool(2, "MPICH") if engine == "mpi" else PlainPool(2, "3", **all_through(engine))
    return contextlib.closing(ranks)


@pytest.mark.parametrize("engine, runs", _ENGINES)
def test_two_threads_that_call_one_function_are_refused(engine: str, runs: int) -> None:
    for run in range(runs):
        with _ranks_of(engine) as ranks:  # the job has failed after it
            for errors, wrong in ranks.run(body_one_function, run):
                assert wrong == [] and errors
                assert all("MismatchError: the ranks of group" in error for error in errors)


def body_function_against(kind: str) -> tuple[str, str]:
    """Call a function on rank 0, and something else on the others; return the errors of it and of the next call."""

    def reduce(x: tf.Tensor) -> tf.Tensor:
        return npu.distribute.all_reduce(x, "sum")

    step = tf.function(reduce)
    step(tf.ones([3]))
    errors = []

    def call(function: Any) -> None:
        try:
            function(tf.ones([3]))
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")

    if npu.distribute.rank() == 0:
        call(step)
    elif kind == "eager call":
        call(lambda x: npu.distribute.all_reduce(x, "max"))
    else:  # the ranks compare what a thread does before its function runs
        thread = threading.Thread(target=call, args=(step,))
        thread.start()
        thread.join(60)
    began = time.monotonic()
    call(step)
    assert time.monotonic() - began < 20, "nobody waits for a rank that has stopped"
    first, second = errors
    return first, second


@pytest.mark.parametrize("kind", ["eager call", "first call of a thread"])
@pytest.mark.parametrize("engine", _ALL_BUT_MPI)
def test_a_function_against_another_call_stops_all_ranks(engine: str, kind: str) -> None:
    with _ranks_of(engine) as ranks:
        for errors in ranks.run(body_function_against, kind):
            for error in errors:
                assert "MismatchError: the ranks of group" in error


@pytest.mark.full
@pytest.mark.parametrize("kind", ["named", "unnamed", "pooled"])
@pytest.mark.parametrize("engine, runs", _ENGINES)
def test_one_group_of_two_threads_on_each_engine(engine: str, runs: int, kind: str) -> None:
    with _ranks_of(engine) as ranks:
        for errors, wrong in ranks.run(body_one_group, 3, kind, runs):
            assert wrong == 0 and len(errors) >= runs
            assert all(error.startswith("MismatchError") for error in errors)


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


@pytest.mark.both_engines
def test_threads_one_after_the_other(several_ranks: Pool) -> None:
    assert several_ranks.run(body_one_after_the_other) == [[0] * 14] * several_ranks.size


def body_names_without_end() -> int:
    """Call in threads that each have a name of their own; return how many of them are remembered."""
    for number in range(200):
        called: list[Any] = []
        thread = threading.Thread(
            target=lambda: called.append(npu.distribute.all_reduce(1.0, "sum")),  # noqa: B023
            name=f"step {number}",
        )
        thread.start()
        thread.join(60)
        assert float(called[0]) == npu.distribute.size()
    return len(current().threads._numbers_of_callers)


def test_nothing_grows_with_the_names_of_threads(several_ranks: Pool) -> None:
    assert max(several_ranks.run(body_names_without_end)) <= 64


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


@pytest.mark.both_engines
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


@pytest.mark.both_engines
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


@pytest.mark.both_engines
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
