"""Empty tensors, shapes that are known at run time only, and 200 MB. Scalars are in ``test_all_reduce.py``."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from collective_bodies import all_to_all, group, in_graph
from heard import error_of
from pool import Pool

from npu_device._src.collectives.engines.tensorflow.engine import rounded
from npu_device._src.collectives.moves import all_gather, all_gather_v, all_to_all_v, all_to_all_vc
from npu_device._src.collectives.ops import all_reduce, broadcast, reduce, reduce_scatter


def body_empty(mode: str) -> dict[str, Any]:
    job, mine = group("world")

    def operations(none: tf.Tensor, wide: tf.Tensor) -> list[tf.Tensor]:
        matrix = tf.zeros([mine.size, mine.size], tf.int32)
        results = [
            all_gather(job, none, mine),
            all_gather(job, wide, mine),
            all_gather_v(job, none, mine),
            all_to_all(job, none, mine),
            all_to_all_vc(job, tf.reshape(none, [-1]), matrix, mine),
            *broadcast(job, [none, wide], 0, mine),
        ]
        if none.dtype != tf.bool:
            results += [
                all_reduce(job, none, "sum", mine),
                reduce(job, none, "sum", 0, mine),
                reduce_scatter(job, none, "sum", mine),
            ]
        return results

    found = {}
    for dtype in ("float32", "int8", "bfloat16", "uint64", "bool") if mode == "eager" else ("float32", "bool"):
        signature = [tf.TensorSpec([None, 3], dtype), tf.TensorSpec(None, dtype)] if mode == "unknown shapes" else None
        call = operations if mode == "eager" else in_graph(operations, input_signature=signature)
        results = call(tf.zeros([0, 3], dtype), tf.zeros([2, 0, 3], dtype))
        found[dtype] = [(value.dtype.name, tuple(value.shape)) for value in results]
    return found


@pytest.mark.parametrize("mode", ["eager", "unknown shapes"])
def test_without_elements(several_ranks: Pool, mode: str) -> None:
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
        return [
            all_gather(job, tensor, mine),
            all_to_all(job, tensor, mine),
            reduce_scatter(job, tensor, "sum", mine),
            all_reduce(job, tensor, "sum", mine),
            *broadcast(job, [tensor, flat], 1, mine),
            all_to_all_v(job, flat, counts, packed, counts, packed, mine),
        ]

    def not_divisible(tensor: tf.Tensor) -> tf.Tensor:
        return reduce_scatter(job, tensor, "sum", mine)

    call = in_graph(operations, input_signature=[tf.TensorSpec(None, tf.int8), tf.TensorSpec([None], tf.int32)])
    tensor = tf.cast(tf.reshape(tf.range(size * 3), [size, 3]) + mine.rank, tf.int8)
    found = [value.numpy() for value in call(tensor, tf.fill([size], 3))]
    return error_of(in_graph(not_divisible, input_signature=[tf.TensorSpec([None])]), tf.zeros([size + 1])), found


@pytest.mark.slow
def test_unknown_static_shapes(several_ranks: Pool) -> None:
    n = several_ranks.size
    tensors = [np.arange(n * 3).reshape(n, 3) + rank for rank in range(n)]
    for rank, (refusal, found) in enumerate(several_ranks.run(body_unknown)):
        assert refusal.startswith("InvalidArgumentError") and "must be a multiple of rank_size" in refusal
        exchanged = np.stack([tensor[rank] for tensor in tensors])
        reduced = [np.concatenate(tensors), exchanged, sum(tensors)[rank : rank + 1], sum(tensors)]
        expected = [*reduced, tensors[1], tensors[1].reshape(-1), exchanged.reshape(-1)]
        assert [array.tolist() for array in found] == [right.tolist() for right in expected]


LARGE = 200_000_000


def body_large() -> list[tuple[float, float, bool]]:
    def resident(which: str) -> float:
        with open("/proc/self/status") as status:
            [line] = [line for line in status if line.startswith(which)]
        return int(line.split()[1]) * 1024

    job, mine = group("world")
    tensor = tf.fill([LARGE // 4], float(mine.rank + 1))
    found = []
    for call, expected in (
        (lambda: all_reduce(job, tensor, "sum", mine), 3.0),
        (lambda: broadcast(job, [tensor], 1, mine)[0], 2.0),
    ):
        with open("/proc/self/clear_refs", "w") as reset:
            reset.write("5")  # forget the highest mark
        before, began = resident("VmRSS"), time.monotonic()
        result = call()
        peak, elapsed = resident("VmHWM") - before, time.monotonic() - began
        found.append((elapsed, peak, bool(tf.reduce_all(result == expected))))
        del result
    return found


def test_200_mb(two_ranks: Pool) -> None:
    for found in two_ranks.run(body_large):
        for elapsed, peak, right in found:
            assert right
            assert elapsed < 25
            # The result, the half under way, and what gRPC holds of it while it sends and receives.
            assert peak < 5 * LARGE


def test_lengths_of_rows_on_tensorflows_backend() -> None:
    for dtype in (tf.int32, tf.int64):
        for length in (0, 1, 3, 4096, 4097, 10_000, 2**30 + 1, 2**31 - 5, 2**31 - 1):
            padded = int(rounded(tf.constant(length, dtype)))
            assert length <= padded <= max(length * 9 // 8, 2 * length if length <= 4096 else 0), (dtype, length)
