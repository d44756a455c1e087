"""Results of reductions and moves: each dtype, operation and compression, on both sides of a slot and of a ring of
shared memory, on both engines; the range and the rounding of sums and means; empty tensors, unknown shapes and 200 MB.
"""

from __future__ import annotations

import time
import zlib
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from caught_messages import error_of
from collective_bodies import FLOATS, INTEGERS, all_to_all, group, in_graph, small_data_in_messages
from conftest import ENGINES
from pool import Pool

import npu_device as npu
from npu_device._src.collectives.dtypes import convert, mean_dtype, sum_dtype
from npu_device._src.collectives.engines.tensorflow.engine import rounded
from npu_device._src.collectives.moves import all_gather, all_gather_v, all_to_all_v, all_to_all_vc
from npu_device._src.collectives.ops import all_reduce, broadcast, reduce, reduce_scatter
from npu_device._src.gradients.reduction import ReductionOptions, reduce_list

pytestmark = pytest.mark.both_engines

SLOT, RING = 512 << 10, 8 << 20  # bytes
LARGE = 200_000_000
COMBINE = {"sum": np.add, "mean": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum}


def _mine(rank: int, length: int, dtype: Any) -> Any:
    """1, 2 and 3, so that every sum and product is a number of every dtype."""
    return ((np.arange(length) + rank) % 3 + 1).astype(dtype)


def _expected(size: int, length: int, dtype: Any, reduction: str) -> np.ndarray:
    found = tf.as_dtype(mean_dtype(tf.as_dtype(dtype)) if reduction == "mean" else dtype)
    total = _mine(0, length, sum_dtype(found).as_numpy_dtype)
    for rank in range(1, size):
        total = COMBINE[reduction](total, _mine(rank, length, total.dtype))
    return (total / total.dtype.type(size) if reduction == "mean" else total).astype(
        found.as_numpy_dtype
    )


@pytest.mark.parametrize("source, target", [("float32", "float16"), ("float16", "float32")])
@pytest.mark.parametrize("length", [1000, 1 << 17], ids=["few", "many"])
def test_conversions_have_the_bits_of_numpy(source: str, target: str, length: int) -> None:
    """Also of what is tiny, infinite, halfway between two numbers, or not aligned."""
    bits = np.random.default_rng(0).integers(0, 1 << 8 * np.dtype(source).itemsize, length + 1)
    values = bits.astype(f"u{np.dtype(source).itemsize}").view(source)[1:]
    values = np.where(np.isnan(values), np.inf, values)
    halfway = np.arange(0, 40, 0.5, source)
    values[: len(halfway)] = 2048 + halfway
    values[len(halfway) : 2 * len(halfway)] = 2.0**-25 * halfway
    converted = np.empty(length, target)
    with np.errstate(all="ignore"):
        convert(values, converted)
        assert converted.tobytes() == values.astype(target).tobytes()


FEW_DTYPES = ("float16", "float32", "int8", "uint32")


def body_operations(
    slots: bool, edge_bytes: int = SLOT, dtypes: tuple[str, ...] = (*FLOATS, *INTEGERS)
) -> tuple[list[Any], int, int]:
    """Return what came out wrong, how much was tried, and a checksum of what is the same on all ranks."""
    job, mine = group("world")
    size, rank = mine.size, mine.rank
    wrong: list[Any] = []
    tried = checksum = 0

    def check(found: Any, expected: np.ndarray, *what: Any) -> None:
        nonlocal tried
        tried += 1
        array = np.asarray(found)
        if array.dtype != expected.dtype or array.tobytes() != expected.tobytes():
            wrong.append((*what, array.dtype.name, array.shape))

    for name in dtypes:
        dtype = tf.as_dtype(name).as_numpy_dtype
        edge = edge_bytes // np.dtype(dtype).itemsize
        lengths = (
            (edge - 1, edge + 1)
            if name == "float32" and (slots or edge_bytes != SLOT)
            else (edge + 1,)
        )
        for length in (
            lengths if name in ("float16", "bfloat16", "float32", "int8", "uint64") else (7,)
        ):
            tensor = tf.constant(_mine(rank, length, dtype))
            for how in COMBINE:
                expected = _expected(size, length, dtype, how)
                reduced = all_reduce(job, tensor, how, mine)
                check(reduced, expected, "all_reduce", name, how, length)
                checksum = zlib.crc32(np.asarray(reduced).tobytes(), checksum)
                if how in ("sum", "mean"):
                    root = reduce(job, tensor, how, size - 1, mine)
                    right = expected if rank == size - 1 else np.zeros_like(expected)
                    check(root, right, "reduce", name, how, length)
                rows = length // size
                block = reduce_scatter(job, tensor[: rows * size], how, mine)
                check(
                    block,
                    expected[rank * rows : (rank + 1) * rows],
                    "reduce_scatter",
                    name,
                    how,
                    length,
                )
            everybody = [_mine(member, length, dtype) for member in range(size)]
            check(
                all_gather(job, tensor, mine), np.concatenate(everybody), "all_gather", name, length
            )
            check(broadcast(job, [tensor], 1, mine)[0], everybody[1], "broadcast", name, length)
            blocks = [other[rank * rows : (rank + 1) * rows] for other in everybody]
            check(
                all_to_all(job, tensor[: rows * size], mine),
                np.concatenate(blocks),
                "all_to_all",
                name,
                length,
            )
    for name, compression, narrow in (("float64", "fp16", 2.0**-10), ("float32", "bf16", 2.0**-7)):
        for length in (
            (SLOT // 2 - 1, SLOT // 2 + 1, RING // 2 + 1)
            if slots
            else (max(edge_bytes // 4, 3), 1 << 19)
        ):
            tensor = tf.constant(_mine(rank, length, name))
            for how in ("sum", "mean"):
                found = npu.distribute.all_reduce(tensor, how, compression=compression)
                close = np.abs(found / _expected(size, length, name, how) - 1).max() <= narrow
                check(
                    [close and found.dtype == name],
                    np.array([True]),
                    compression,
                    name,
                    how,
                    length,
                )
                checksum = zlib.crc32(np.asarray(found).tobytes(), checksum)
    length = RING + 1 if slots else (1 << 20)
    found = npu.distribute.all_reduce(tf.constant(_mine(rank, length, np.int8)), "mean")
    check(found, _expected(size, length, np.int8, "mean"), "mean of many integers")
    return wrong, tried, checksum


@pytest.mark.more_engines("tcp", "mpi", "Open MPI")
def test_every_operation_on_both_sides_of_a_slot(several_ranks: Pool, engine: str) -> None:
    dtypes = (*FLOATS, *INTEGERS) if engine in ENGINES else FEW_DTYPES
    results = several_ranks.run(body_operations, engine == "shared_memory", SLOT, dtypes)
    for wrong, tried, _ in results:
        assert wrong == []
        assert tried > 15 * len(dtypes)
    assert len({checksum for *_, checksum in results}) == 1, "the bits differ among the ranks"


def body_messages() -> tuple[tuple[list[Any], int, int], int, int]:
    """``body_operations`` with lengths on both sides of what a message carries; and how many messages and calls of
    TensorFlow's kernels a small and a larger sum take.
    """
    job, mine = group("world")

    def keys() -> int:
        return sum(
            count for _, count in job.engines.tensorflow.kernels.sequence_of(mine)._drawn.values()
        )

    with small_data_in_messages() as room:
        found = body_operations(False, room)
        taken = []
        for length in (256, 257):
            before = keys()
            all_reduce(job, tf.zeros([length]), "sum", mine)
            taken.append(keys() - before)
    return found, taken[0], taken[1]


@pytest.mark.slow
@pytest.mark.parametrize("tensorflow_ranks", [2], indirect=True)
def test_every_operation_on_both_sides_of_a_message(tensorflow_ranks: Pool) -> None:
    results = tensorflow_ranks.run(body_messages)
    for (wrong, tried, _), of_small, of_larger in results:
        assert wrong == []
        assert tried > 180
        assert (of_small, of_larger) == (0, 1)
    assert len({checksum for (*_, checksum), *_ in results}) == 1, "the bits differ among the ranks"


def body_mixed() -> list[list[float]]:
    """Sums, with gradients, of lengths that only the graph of the first rank doesn't know before it runs."""
    job, mine = group("world")

    def total(value: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        with tf.GradientTape() as tape:
            tape.watch(value)
            reduced = all_reduce(job, value, "sum", mine)
        return reduced, tape.gradient(reduced, value, tf.cast(mine.rank, tf.float32) * reduced)

    with small_data_in_messages():
        results = []
        for length in (3, 256, 257, 3000):
            known = None if mine.rank == 0 else length
            found = in_graph(total, input_signature=[tf.TensorSpec([known])])(tf.ones([length]))
            results.append([float(one[-1]) for one in found])
    return results


def test_small_sums_of_lengths_that_some_graphs_do_not_know(tensorflow_ranks: Pool) -> None:
    n = tensorflow_ranks.size
    for found in tensorflow_ranks.run(body_mixed):
        assert found == [[n, n * sum(range(n))]] * 4


def body_range() -> dict[str, Any]:
    reduce = npu.distribute.all_reduce
    large = tf.fill([100_000], 60000.0)
    half = tf.cast(large, tf.float16)
    sign = 1 - 2 * (npu.open().worker_id % 2)
    return {
        "sum": reduce(large, "sum", compression="fp16")[-1].numpy(),
        "mean": reduce(large, "mean", compression="fp16")[-1].numpy(),
        "mean of float16": float(reduce(half, "mean")[-1]),
        "two of each sign": float(reduce(half * sign, "sum")[-1]),
        "bfloat16": float(
            reduce(tf.constant([2.0**100], tf.bfloat16), "mean", compression="fp16")[0]
        ),
        "small": reduce(tf.constant([2.0**-14, 1.0]), "sum", compression="fp16").numpy().tolist(),
        "int32": float(reduce(tf.constant([2_000_000_001]), "mean")[0]),
        "uint64": float(reduce(tf.constant([1 << 63], tf.uint64), "mean")[0]),
    }


@pytest.mark.more_engines("tcp", "mpi")
def test_no_sum_is_infinite_that_has_a_number(several_ranks: Pool) -> None:
    n = several_ranks.size
    for found in several_ranks.run(body_range):
        assert found == {
            "sum": pytest.approx(n * 60000.0, rel=2**-10),
            "mean": 60000.0,
            "mean of float16": 60000.0,
            "two of each sign": n % 2 * 60000.0,
            "bfloat16": 2.0**100,
            "small": [n * 2.0**-14, float(n)],
            "int32": 2_000_000_001.0,
            "uint64": 2.0**63,
        }


def body_equal() -> list[Any]:
    """Return what has changed in a mean of equal values."""
    job, mine = group("world")
    wrong = []
    for dtype in (tf.float16, tf.bfloat16, tf.float32, tf.float64):
        if (
            dtype.size == 2
        ):  # all numbers whose sum float32 holds; TensorFlow takes the smallest of bfloat16 for zero
            values = np.arange(1 << 16, dtype=np.uint16).view(dtype.as_numpy_dtype)
            magnitude = np.abs(values.astype(np.float32))
            values = values[(magnitude > 1e-30) & (magnitude < 1e30)]
        else:  # of few digits, so that their sum is a number of the dtype
            values = np.arange(-60_000, 60_000).astype(dtype.as_numpy_dtype) / 8
        same = tf.constant(values[: len(values) // mine.size * mine.size])
        slices = tf.IndexedSlices(same[:100], tf.range(100), tf.constant([100_000]))
        found = [
            (all_reduce(job, same, "mean", mine), same),
            (reduce_scatter(job, same, "mean", mine), tf.split(same, mine.size)[mine.rank]),
            (reduce(job, same, "mean", 0, mine), same if mine.rank == 0 else tf.zeros_like(same)),
            (
                reduce_list(job, [slices], ReductionOptions("mean", adds_rows=True), mine)[
                    0
                ].values,
                same[:100],
            ),
        ]
        if dtype != tf.bfloat16:  # which reaches beyond float16
            compressed = npu.distribute.all_reduce(
                tf.cast(same, tf.float64), "mean", compression="fp16"
            )
            found.append((compressed, tf.cast(tf.cast(same, tf.float16), tf.float64)))
        wrong += [
            (dtype.name, place) for place, (one, other) in enumerate(found) if np.any(one != other)
        ]
    return wrong


@pytest.mark.more_engines("tcp", "mpi")
def test_the_mean_of_equal_values_is_that_value(several_ranks: Pool) -> None:
    assert several_ranks.run(body_equal) == [[]] * several_ranks.size


def body_block() -> list[bool]:
    job, mine = group("world")
    same = []
    for name in FLOATS:
        tensor = tf.cast(tf.random.stateless_normal([mine.size * 50_000], [mine.rank, 7]), name)
        for how in COMBINE:
            whole = np.asarray(all_reduce(job, tensor, how, mine))
            block = np.asarray(reduce_scatter(job, tensor, how, mine))
            same.append(block.tobytes() == whole[mine.rank * 50_000 :][:50_000].tobytes())
    return same


@pytest.mark.more_engines("tcp", "mpi")
def test_reduce_scatter_gives_the_bits_of_all_reduce(several_ranks: Pool, engine: str) -> None:
    if engine == "tensorflow":
        pytest.skip("TensorFlow's ring adds up in another order for each block")
    for same in several_ranks.run(body_block):
        assert same == [True] * len(FLOATS) * len(COMBINE)


def body_empty(mode: str) -> dict[str, Any]:
    job, mine = group("world")

    def operations(none: tf.Tensor, wide: tf.Tensor) -> list[tf.Tensor]:
        matrix = tf.zeros([mine.size, mine.size], tf.int32)
        moved = [
            all_gather(job, none, mine),
            all_gather(job, wide, mine),
            all_gather_v(job, none, mine),
        ]
        moved += [
            all_to_all(job, none, mine),
            all_to_all_vc(job, tf.reshape(none, [-1]), matrix, mine),
        ]
        moved += broadcast(job, [none, wide], 0, mine)
        if none.dtype == tf.bool:
            return moved
        reduced = [all_reduce(job, none, "sum", mine), reduce(job, none, "sum", 0, mine)]
        return [*moved, *reduced, reduce_scatter(job, none, "sum", mine)]

    found = {}
    for dtype in (
        ("float32", "int8", "bfloat16", "uint64", "bool")
        if mode == "eager"
        else ("float32", "bool")
    ):
        signature = (
            [tf.TensorSpec([None, 3], dtype), tf.TensorSpec(None, dtype)]
            if mode == "unknown shapes"
            else None
        )
        call = operations if mode == "eager" else in_graph(operations, input_signature=signature)
        results = call(tf.zeros([0, 3], dtype), tf.zeros([2, 0, 3], dtype))
        found[dtype] = [(value.dtype.name, tuple(value.shape)) for value in results]
    return found


@pytest.mark.more_engines("tcp", "mpi", mode=["eager"])
@pytest.mark.parametrize("mode", ["eager", "unknown shapes"])
def test_tensors_without_elements_keep_their_shape_and_dtype(
    several_ranks: Pool, mode: str
) -> None:
    n = several_ranks.size
    none, wide = (0, 3), (2, 0, 3)
    shapes = [none, (2 * n, 0, 3), none, none, (0,), none, wide, none, none, none]
    for found in several_ranks.run(body_empty, mode):
        for dtype, results in found.items():
            assert results == [(dtype, shape) for shape in shapes[: len(results)]]


def body_unknown() -> tuple[str, list[np.ndarray]]:
    job, mine = group("world")
    size = mine.size

    def operations(tensor: tf.Tensor, counts: tf.Tensor) -> list[tf.Tensor]:
        packed = tf.cumsum(counts, exclusive=True)
        flat = tf.reshape(tensor, [-1])
        reduced = [reduce_scatter(job, tensor, "sum", mine), all_reduce(job, tensor, "sum", mine)]
        moved = [
            *broadcast(job, [tensor, flat], 1, mine),
            all_to_all_v(job, flat, *[counts, packed] * 2, mine),
        ]
        return [all_gather(job, tensor, mine), all_to_all(job, tensor, mine), *reduced, *moved]

    call = in_graph(
        operations, input_signature=[tf.TensorSpec(None, tf.int8), tf.TensorSpec([None], tf.int32)]
    )
    tensor = tf.cast(tf.reshape(tf.range(size * 3), [size, 3]) + mine.rank, tf.int8)
    found = [value.numpy() for value in call(tensor, tf.fill([size], 3))]
    signature = [tf.TensorSpec([None])]
    scatter = in_graph(
        lambda rows: reduce_scatter(job, rows, "sum", mine), input_signature=signature
    )
    return error_of(scatter, tf.zeros([size + 1])), found


@pytest.mark.slow
def test_shapes_that_only_the_graph_knows_are_checked_when_it_runs(several_ranks: Pool) -> None:
    n = several_ranks.size
    tensors = [np.arange(n * 3).reshape(n, 3) + rank for rank in range(n)]
    for rank, (refusal, found) in enumerate(several_ranks.run(body_unknown)):
        assert (
            refusal.startswith("InvalidArgumentError")
            and "must be a multiple of rank_size" in refusal
        )
        exchanged = np.stack([tensor[rank] for tensor in tensors])
        reduced = [np.concatenate(tensors), exchanged, sum(tensors)[rank : rank + 1], sum(tensors)]
        expected = [*reduced, tensors[1], tensors[1].reshape(-1), exchanged.reshape(-1)]
        assert [array.tolist() for array in found] == [right.tolist() for right in expected]


def body_large() -> list[tuple[float, float, bool]]:
    def resident(which: str) -> float:
        with open("/proc/self/status") as status:
            [line] = [line for line in status if line.startswith(which)]
        return int(line.split()[1]) * 1024

    job, mine = group("world")
    tensor = tf.fill([LARGE // 4], float(mine.rank + 1))
    found = []
    calls = (
        (lambda: all_reduce(job, tensor, "sum", mine), 3.0),
        (lambda: broadcast(job, [tensor], 1, mine)[0], 2.0),
    )
    for call, expected in calls:
        with open("/proc/self/clear_refs", "w") as reset:
            reset.write("5")  # forget the highest mark
        before, began = resident("VmRSS"), time.monotonic()
        result = call()
        peak, elapsed = resident("VmHWM") - before, time.monotonic() - began
        found.append((elapsed, peak, bool(tf.reduce_all(result == expected))))
        del result
    return found


@pytest.mark.once
def test_200_mb_are_reduced_in_time_and_little_memory(two_ranks: Pool) -> None:
    for found in two_ranks.run(body_large):
        for elapsed, peak, right in found:
            assert right and elapsed < 25
            # The result, the half under way, and what gRPC holds of it while it sends and receives.
            assert peak < 5 * LARGE


def test_lengths_of_rows_on_tensorflows_engine() -> None:
    for length in (0, 1, 4096, 4097, 2**30 + 1, 2**31 - 1):
        padded = int(rounded(tf.constant(length, tf.int32)))
        assert length <= padded <= max(length * 9 // 8, 2 * length if length <= 4096 else 0), length
