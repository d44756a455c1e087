"""Every operation × dtype × world size × group × eager and graph, against numpy."""

from __future__ import annotations

import time
from typing import Any

import collective_bodies as bodies
import numpy as np
import pytest
import tensorflow as tf
from pool import Pool

from npu_device._src.collectives.moves import all_gather, all_gather_v, all_to_all_v, all_to_all_vc, receive, send
from npu_device._src.collectives.ops import all_reduce, barrier, broadcast, reduce, reduce_scatter

pytestmark = pytest.mark.both_backends


# All dtypes eagerly, and a few in graphs and in a group of some ranks: TensorFlow traces a function for each.
EVERY_DTYPE = bodies.FLOATS + bodies.INTEGERS + bodies.OTHERS
FEW_DTYPES = ("bfloat16", "float64", "int8", "int64", "bool", "complex64")
KINDS_MODES_AND_DTYPES = [
    pytest.param("world", "eager", EVERY_DTYPE, id="world-eager"),
    pytest.param("world", "graph", ("bfloat16", "bool"), id="world-graph"),
    pytest.param("sub", "graph", ("int8",), id="sub-graph"),
]


def body_moves(kind: str, mode: str, dtypes: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    job, mine = bodies.group(kind)
    size, me = mine.size, mine.rank
    matrix = bodies.counts(size)

    def moves(tensor: tf.Tensor) -> dict[str, tf.Tensor]:
        flat = tf.reshape(tensor, [-1])
        results = {
            "all_gather": all_gather(job, tensor, mine),
            "all_gather_v": all_gather_v(job, tensor[: me + 1], mine),
            "all_to_all": bodies.all_to_all(job, tensor, mine),
            "all_to_all_v": all_to_all_v(
                job, flat, matrix[me], bodies.apart(matrix[me]), matrix[:, me], bodies.apart(matrix[:, me]), mine
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
            name: (value.dtype.name, bodies.plain(value))
            for name, value in call(tf.cast(bodies.values(rank, (2 * size, 3), dtype), dtype)).items()
        }
        for dtype in dtypes
    }


def moved(ranks: tuple[int, ...], me: int, dtype: str) -> dict[str, np.ndarray]:
    size = len(ranks)
    tensors = [bodies.values(rank, (2 * size, 3), dtype) for rank in ranks]
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


@pytest.mark.parametrize(("kind", "mode", "dtypes"), KINDS_MODES_AND_DTYPES)
def test_moves(several_ranks: Pool, kind: str, mode: str, dtypes: tuple[str, ...]) -> None:
    for rank, results in enumerate(several_ranks.run(body_moves, kind, mode, dtypes)):
        ranks = bodies.members(several_ranks.size, rank, kind)
        for dtype, found in results.items():
            expected = moved(ranks, ranks.index(rank), dtype)
            assert found.keys() == expected.keys()
            for name, (found_dtype, array) in found.items():
                assert found_dtype == dtype, name
                np.testing.assert_array_equal(array, expected[name], err_msg=f"{name} {dtype} rank {rank}")


def body_reductions(kind: str, mode: str, dtypes: tuple[str, ...]) -> dict[str, dict[Any, Any]]:
    job, mine = bodies.group(kind)

    def reductions(tensor: tf.Tensor) -> dict[Any, tf.Tensor]:
        results = {}
        for reduction in bodies.REDUCTIONS:
            results["all_reduce", reduction] = all_reduce(job, tensor, reduction, mine)
            results["reduce", reduction] = reduce(job, tensor, reduction, mine.size - 1, mine)
            results["reduce_scatter", reduction] = reduce_scatter(job, tensor, reduction, mine)
        return results

    call = bodies.in_graph(reductions) if mode == "graph" else reductions
    return {
        dtype: {
            key: (value.dtype.name, bodies.plain(value))
            for key, value in call(tf.cast(bodies.values(job.cluster.rank, (2 * mine.size, 3)), dtype)).items()
        }
        for dtype in dtypes
        if dtype not in bodies.OTHERS
    }


@pytest.mark.parametrize(("kind", "mode", "dtypes"), KINDS_MODES_AND_DTYPES)
def test_reductions(several_ranks: Pool, kind: str, mode: str, dtypes: tuple[str, ...]) -> None:
    for rank, results in enumerate(several_ranks.run(body_reductions, kind, mode, dtypes)):
        ranks = bodies.members(several_ranks.size, rank, kind)
        size, me = len(ranks), ranks.index(rank)
        everybody = np.stack([bodies.values(other, (2 * size, 3)) for other in ranks])
        for dtype, found in results.items():
            for (operation, reduction), (found_dtype, array) in found.items():
                expected = bodies.REDUCTIONS[reduction](everybody, axis=0)
                if dtype in bodies.INTEGERS and reduction == "mean":
                    assert found_dtype == ("float32" if dtype.endswith(("t8", "t16")) else "float64")
                else:
                    assert found_dtype == dtype
                    if dtype in bodies.INTEGERS:  # products of narrow integers wrap around
                        expected = expected.astype(np.int64).astype(dtype)
                if operation == "reduce" and me != size - 1:
                    expected = np.zeros_like(expected)
                if operation == "reduce_scatter":
                    expected = expected[2 * me : 2 * me + 2]
                tolerance = {"float16": 2e-3, "bfloat16": 2e-2}.get(dtype, 1e-6)
                np.testing.assert_allclose(
                    array, expected, rtol=tolerance, err_msg=f"{operation} {reduction} {dtype} rank {rank}"
                )


def body_bits() -> dict[str, Any]:
    job, mine = bodies.group("world")
    bits = np.frombuffer(np.random.default_rng(mine.rank).bytes(96), np.uint8)
    results = {}
    for dtype in ("float16", "bfloat16", "float32", "float64", "uint64", "int64", "complex64", "int8"):
        size = tf.as_dtype(dtype).size
        own = tf.bitcast(tf.reshape(bits, [-1, size]) if size > 1 else bits, dtype)
        results[dtype] = all_gather(job, own, mine).numpy().tobytes()
    high = tf.constant([2**63 + mine.rank, 5 + mine.rank, 2**64 - 1], tf.uint64)
    for reduction in ("min", "max", "sum"):
        results[reduction] = all_reduce(job, high, reduction, mine).numpy().tolist()
    return results


def test_moved_bits_stay_as_they_are(several_ranks: Pool) -> None:
    n = several_ranks.size
    bits = b"".join(np.random.default_rng(rank).bytes(96) for rank in range(n))
    for results in several_ranks.run(body_bits):
        assert results.pop("min") == [2**63, 5, 2**64 - 1]
        assert results.pop("max") == [2**63 + n - 1, 5 + n - 1, 2**64 - 1]
        total = n * (n - 1) // 2
        assert results.pop("sum") == [(n * 2**63 + total) % 2**64, 5 * n + total, n * (2**64 - 1) % 2**64]
        for dtype, found in results.items():
            assert found == bits, dtype


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


def test_in_a_loop(several_ranks: Pool) -> None:
    n = several_ranks.size
    expected = np.zeros(n)
    for step in range(5):
        moved = np.arange(1, n + 1) + step
        expected += n * moved + sum(moved[: rank + 1].sum() for rank in range(n))
    for rank, found in enumerate(several_ranks.run(body_loop)):
        assert found == [expected[rank], expected[rank]]


def body_barrier() -> tuple[float, float, int]:
    job, mine = bodies.group("world")
    barrier(job, mine)
    began = time.monotonic()
    if mine.rank == mine.size - 1:
        time.sleep(0.5)
    came = barrier(job, mine)
    waited = time.monotonic() - began
    came_in_graph = bodies.in_graph(lambda: barrier(job, mine))()
    return waited, int(came), int(came_in_graph)


def test_barrier(several_ranks: Pool) -> None:
    for waited, came, came_in_graph in several_ranks.run(body_barrier):
        assert 0.4 < waited < 5
        assert came == came_in_graph == several_ranks.size
