"""The operations that move data × dtype × world size × group × eager and graph, in loops and in pairs of ranks; and the
barrier. Reductions are in ``test_collective_numbers.py``.
"""

from __future__ import annotations

import time
from typing import Any

import collective_bodies as bodies
import numpy as np
import pytest
import tensorflow as tf
from conftest import ENGINES
from pool import Pool

from npu_device._src.collectives.moves import (
    all_gather,
    all_gather_v,
    all_to_all_v,
    all_to_all_vc,
    receive,
    send,
)
from npu_device._src.collectives.ops import barrier, broadcast, reduce_scatter

pytestmark = pytest.mark.both_engines

# All dtypes eagerly, and a few in graphs and in a group of some ranks: TensorFlow traces a function for each.
EVERY_DTYPE = (*bodies.FLOATS, *bodies.INTEGERS, "bool", "complex64", "complex128")
FEW_DTYPES = ("bfloat16", "int8", "bool", "complex64")


def bits(rank: int, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Return random bits, also of numbers that are none."""
    kind, chance = np.dtype(tf.as_dtype(dtype).as_numpy_dtype), np.random.default_rng(rank)
    if dtype == "bool":
        return chance.integers(0, 2, shape).astype(bool)
    return (
        np.frombuffer(chance.bytes(int(np.prod(shape)) * kind.itemsize), np.uint8)
        .view(kind)
        .reshape(shape)
    )


def body_moves(kind: str, mode: str, dtypes: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    job, mine = bodies.group(kind)
    size, me = mine.size, mine.rank
    matrix = bodies.counts(size)

    def moves(tensor: tf.Tensor) -> dict[str, tf.Tensor]:
        flat = tf.reshape(tensor, [-1])
        sends, receives = matrix[me], matrix[:, me]
        results = {
            "all_gather": all_gather(job, tensor, mine),
            "all_gather_v": all_gather_v(job, tensor[: me + 1], mine),
            "all_to_all": bodies.all_to_all(job, tensor, mine),
            "all_to_all_v": all_to_all_v(
                job, flat, sends, bodies.apart(sends), receives, bodies.apart(receives), mine
            ),
            "all_to_all_vc": all_to_all_vc(job, flat, matrix, mine),
            "broadcast": broadcast(job, [flat[:1], tensor], size - 1, mine)[1],
        }
        if size > 1:
            if me == 0:
                send(job, tensor[0], 7, size - 1, mine)
            elif me == size - 1:
                results["receive"] = receive(job, [3], tensor.dtype, 7, 0, mine)
        return results

    call = bodies.in_graph(moves) if mode == "graph" else moves
    rank = job.cluster.rank
    return {
        dtype: {
            name: (value.dtype.name, tuple(value.shape), value.numpy().tobytes())
            for name, value in call(tf.constant(bits(rank, (2 * size, 3), dtype))).items()
        }
        for dtype in dtypes
    }


def moved(ranks: tuple[int, ...], me: int, dtype: str) -> dict[str, np.ndarray]:
    size = len(ranks)
    tensors = [bits(rank, (2 * size, 3), dtype) for rank in ranks]
    matrix = bodies.counts(size)
    places = bodies.apart(matrix[:, me])
    result = np.zeros(max((matrix[:, me] + places)[matrix[:, me] > 0], default=0), tensors[0].dtype)
    blocks = []
    for source, tensor in enumerate(tensors):
        begin = bodies.apart(matrix[source])[me]
        block = tensor.reshape(-1)[begin : begin + matrix[source, me]]
        result[places[source] : places[source] + len(block)] = block
        begin = matrix[source, :me].sum()
        blocks.append(tensor.reshape(-1)[begin : begin + matrix[source, me]])
    expected = {
        "all_gather": np.concatenate(tensors),
        "all_gather_v": np.concatenate([tensor[: rank + 1] for rank, tensor in enumerate(tensors)]),
        "all_to_all": np.concatenate([tensor[2 * me : 2 * me + 2] for tensor in tensors]),
        "all_to_all_v": result,
        "all_to_all_vc": np.concatenate(blocks),
        "broadcast": tensors[-1],
    }
    if size > 1 and me == size - 1:
        expected["receive"] = tensors[0][0]
    return expected


@pytest.mark.more_engines("tcp", "mpi", "Open MPI", kind=["world"], mode=["eager"])
@pytest.mark.parametrize(
    ("kind", "mode", "dtypes"),
    [("world", "eager", EVERY_DTYPE), ("world", "graph", ("bool",)), ("sub", "graph", ("int8",))],
    ids=["world-eager", "world-graph", "sub-graph"],
)
def test_moved_values_arrive_at_the_right_ranks(
    several_ranks: Pool, kind: str, mode: str, dtypes: tuple[str, ...], engine: str
) -> None:
    dtypes = dtypes if engine in ENGINES else FEW_DTYPES
    for rank, results in enumerate(several_ranks.run(body_moves, kind, mode, dtypes)):
        ranks = bodies.members(several_ranks.size, rank, kind)
        for dtype, found in results.items():
            for name, right in moved(ranks, ranks.index(rank), dtype).items():
                assert found.pop(name) == (dtype, right.shape, right.tobytes()), (
                    f"{name} {dtype} rank {rank}"
                )
            assert not found


def body_loop() -> Any:
    job, mine = bodies.group("world")

    exchange, gather, scatter = bodies.as_they_are(bodies.all_to_all, all_gather_v, reduce_scatter)

    @tf.function
    def loop(steps: tf.Tensor) -> tf.Tensor:
        block = tf.fill([mine.size], float(mine.rank + 1))
        total = tf.constant(0.0)
        for step in tf.range(steps):
            moved = exchange(job, block + tf.cast(step, tf.float32), mine)
            rows = gather(job, moved[: mine.rank + 1], mine)
            total += tf.reduce_sum(scatter(job, moved, "sum", mine)) + tf.reduce_sum(rows)
        return total

    return [float(loop(tf.constant(5))), float(loop(tf.constant(5)))]


@pytest.mark.more_engines("tcp", "mpi")
def test_collectives_run_in_each_round_of_a_loop(several_ranks: Pool) -> None:
    n = several_ranks.size
    expected = np.zeros(n)
    for step in range(5):
        moved = np.arange(1, n + 1) + step
        expected += n * moved + sum(moved[: rank + 1].sum() for rank in range(n))
    assert several_ranks.run(body_loop) == [[total, total] for total in expected]


def body_barrier() -> tuple[float, float, int, int]:
    """Return when this rank called a barrier, when it was let go, and how many ranks had come."""
    job, mine = bodies.group("world")
    barrier(job, mine)
    if mine.rank == mine.size - 1:
        time.sleep(0.5)
    called_at = time.monotonic()
    came = barrier(job, mine)
    left_at = time.monotonic()
    came_in_graph = bodies.in_graph(lambda: barrier(job, mine))()
    return called_at, left_at, int(came), int(came_in_graph)


@pytest.mark.more_engines("tcp", "mpi")
def test_a_rank_leaves_a_barrier_after_all_have_come(several_ranks: Pool) -> None:
    results = several_ranks.run(body_barrier)
    last_call = max(called_at for called_at, *_ in results)
    for _, left_at, came, came_in_graph in results:
        assert left_at >= last_call
        assert came == came_in_graph == several_ranks.size


# send and receive


def body_ring(length: int) -> Any:
    job, mine = bodies.group("world")
    send_as_it_is, receive_as_it_is = bodies.as_they_are(send, receive)
    following, before = (mine.rank + 1) % mine.size, (mine.rank - 1) % mine.size

    @tf.function
    def ring(steps: tf.Tensor) -> tf.Tensor:
        value = tf.fill([length], tf.cast(mine.rank, tf.int16))
        for _ in tf.range(steps):
            send_as_it_is(job, value, 3, following, mine)  # everybody sends before anybody receives
            value = receive_as_it_is(job, [length], tf.int16, 3, before, mine)
        return value

    return ring(tf.constant(1)).numpy(), ring(tf.constant(mine.size)).numpy()


@pytest.mark.more_engines("tcp", "mpi")
def test_everybody_sends_first_in_a_graph(several_ranks: Pool) -> None:
    n = several_ranks.size
    for length in (0, 1, 2_000_001):  # the last one is more than sockets hold
        for rank, (once, around) in enumerate(several_ranks.run(body_ring, length, timeout=30)):
            np.testing.assert_array_equal(once, np.full(length, (rank - 1) % n))
            np.testing.assert_array_equal(around, np.full(length, rank))


def body_tags() -> Any:
    job, mine = bodies.group("world")
    last = mine.size - 1

    def crossed() -> list[tf.Tensor]:
        if mine.rank == 0:
            for tag in (1, 2, 3):
                send(job, tf.fill([4], float(tag)), tag, last, mine)
        elif mine.rank == last:
            return [receive(job, [4], tf.float32, tag, 0, mine) for tag in (3, 1, 2)]
        return []

    found = [value.numpy().tolist() for value in bodies.in_graph(crossed)()]
    for call in range(
        14
    ):  # the same tag again is a queue; more tags than connections that are kept
        tag = 1 if call < 2 else call % 6
        if mine.rank == 0:
            send(job, tf.constant([call, call]), tag, last, mine)
        elif mine.rank == last:
            found.append(receive(job, (2,), tf.int32, tag, 0, mine).numpy().tolist())
    return found


@pytest.mark.more_engines("tcp", "mpi", "Open MPI")
def test_tags_are_not_mixed_up(several_ranks: Pool) -> None:
    *others, last = several_ranks.run(body_tags, timeout=30)
    assert others == [[]] * (several_ranks.size - 1)
    assert last == [[3.0] * 4, [1.0] * 4, [2.0] * 4, *([call] * 2 for call in range(14))]


def body_refusals() -> list[str]:
    job, mine = bodies.group("world")
    one, other, size = tf.constant([1.0]), (mine.rank + 1) % mine.size, mine.size
    return bodies.wrong_refusals(
        ("ValueError", "with itself", send, job, one, 0, mine.rank, mine),
        (
            f"ValueError: dest_rank {size} ",
            f"expected 0 to {size - 1}",
            send,
            job,
            one,
            0,
            size,
            mine,
        ),
        ("ValueError: src_rank -1 ", "", receive, job, [1], tf.float32, 0, -1, mine),
        ("TypeError", "string", send, job, tf.constant("text"), 0, other, mine),
        ("ValueError", "every dimension", receive, job, [None, 2], tf.float32, 0, other, mine),
    )


def test_wrong_arguments_of_collectives_are_errors_on_every_rank(several_ranks: Pool) -> None:
    assert several_ranks.run(body_refusals) == [[]] * several_ranks.size
