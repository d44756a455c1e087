"""Gradients of the collectives against those of the same computation in one process.

Every rank has a loss of its own; the gradient of a rank's input is that of the sum of all ranks' losses.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from collective_bodies import all_to_all, apart, counts, group, in_graph
from pool import Pool

import npu_device as npu
from npu_device._src.collectives.moves import all_gather, all_gather_v, all_to_all_v, all_to_all_vc
from npu_device._src.collectives.ops import all_reduce, broadcast, reduce, reduce_scatter

OPERATIONS = (
    "all_reduce sum",
    "all_reduce mean",
    "all_gather",
    "all_gather_v",
    "all_to_all",
    "all_to_all_v",
    "all_to_all_vc",
    "broadcast",
    "reduce sum",
    "reduce mean",
    "reduce_scatter sum",
    "reduce_scatter mean",
    "reduce_scatter max",
)


BLOCK = 6  # elements of a rank's share


def inputs(rank: int, size: int) -> np.ndarray:
    return np.random.default_rng(rank).standard_normal(BLOCK * size).astype(np.float32)


def loss_of(value: Any, rank: int) -> Any:
    weights = tf.cast(tf.range(tf.size(value)) + rank + 1, value.dtype)
    return tf.reduce_sum(weights * value * value)


def alone(operation: str, tensors: list[Any], rank: int) -> Any:
    """Return what ``rank`` gets, computed from everybody's tensors in one process."""
    size = len(tensors)
    matrix = counts(size)
    name, _, reduction = operation.partition(" ")
    reduced = {"sum": tf.add_n, "mean": lambda all_: tf.add_n(all_) / size, "max": lambda all_: tf.reduce_max(all_, 0)}
    if name == "all_gather":
        return tf.concat(tensors, 0)
    if name == "all_gather_v":
        return tf.concat([tensor[: i + 1] for i, tensor in enumerate(tensors)], 0)
    if name == "all_to_all":
        return tf.concat([tensor[BLOCK * rank : BLOCK * (rank + 1)] for tensor in tensors], 0)
    if name == "broadcast":
        return tensors[size - 1]
    if name == "all_reduce":
        return reduced[reduction](tensors)
    if name == "reduce":
        return reduced[reduction](tensors) if rank == size - 1 else tf.zeros_like(tensors[rank])
    if name == "reduce_scatter":
        return reduced[reduction](tensors)[BLOCK * rank : BLOCK * (rank + 1)]
    begins = [(apart(row) if name == "all_to_all_v" else np.cumsum([0, *row]))[rank] for row in matrix]
    blocks = [tensor[begin : begin + row[rank]] for tensor, begin, row in zip(tensors, begins, matrix)]
    if name == "all_to_all_vc":
        return tf.concat(blocks, 0)
    order = np.argsort(apart(matrix[:, rank]))
    parts: list[Any] = []
    for source in order:
        if matrix[source, rank]:
            gap = apart(matrix[:, rank])[source] - sum(part.shape[0] for part in parts)
            parts += [tf.zeros([gap]), blocks[source]]
    return tf.concat(parts, 0)


def body_gradients(mode: str) -> dict[str, Any]:
    job, mine = group("world")
    size, me = mine.size, mine.rank
    matrix = counts(size)
    row, column = matrix[me], matrix[:, me]
    calls = {
        "all_gather": lambda x: all_gather(job, x, mine),
        "all_gather_v": lambda x: all_gather_v(job, x[: me + 1], mine),
        "all_to_all": lambda x: all_to_all(job, x, mine),
        "all_to_all_v": lambda x: all_to_all_v(job, x, row, apart(row), column, apart(column), mine),
        "all_to_all_vc": lambda x: all_to_all_vc(job, x, matrix, mine),
        "broadcast": lambda x: broadcast(job, [x], size - 1, mine)[0],
    }
    for reduction in ("sum", "mean"):
        calls[f"all_reduce {reduction}"] = lambda x, how=reduction: all_reduce(job, x, how, mine)
        calls[f"reduce {reduction}"] = lambda x, how=reduction: reduce(job, x, how, size - 1, mine)
    for reduction in ("sum", "mean", "max"):
        calls[f"reduce_scatter {reduction}"] = lambda x, how=reduction: reduce_scatter(job, x, how, mine)

    def derivatives(call: Any, x: Any) -> Any:
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as tape:
                tape.watch(x)
                loss = loss_of(call(x), me)
            gradient = tape.gradient(loss, x)
            length = tf.reduce_sum(gradient * gradient)
        return [gradient, outer.gradient(length, x)] if mode == "graph" else [gradient]

    results = {}
    for operation in OPERATIONS:

        def both(x: Any, operation: str = operation) -> Any:
            return derivatives(calls[operation], x)

        run = in_graph(both) if mode == "graph" else both
        results[operation] = [value.numpy() for value in run(tf.constant(inputs(me, size)))]
    return results


@pytest.mark.parametrize("mode", ["graph", "eager"])
def test_gradients(several_ranks: Pool, mode: str) -> None:
    size = several_ranks.size
    found = several_ranks.run(body_gradients, mode)
    for operation in OPERATIONS:
        tensors = [tf.constant(inputs(rank, size)) for rank in range(size)]
        with tf.GradientTape() as outer:
            outer.watch(tensors)
            with tf.GradientTape() as tape:
                tape.watch(tensors)
                loss = tf.add_n([loss_of(alone(operation, tensors, rank), rank) for rank in range(size)])
            gradients = tape.gradient(loss, tensors, unconnected_gradients="zero")
            length = tf.add_n([tf.reduce_sum(gradient * gradient) for gradient in gradients])
        seconds = outer.gradient(length, tensors, unconnected_gradients="zero")
        for rank in range(size):
            for array, right in zip(found[rank][operation], (gradients[rank], seconds[rank])):
                np.testing.assert_allclose(array, right.numpy(), rtol=1e-4, atol=1e-5, err_msg=f"{operation} {rank}")


def body_rows_of_the_result(graph: bool) -> Any:
    value = tf.ones([3, 2]) * (npu.distribute.rank() + 1)

    def gradient() -> Any:
        with tf.GradientTape() as tape:
            tape.watch(value)
            loss = tf.reduce_sum(tf.gather(npu.distribute.all_reduce(value, "sum"), [0, 0, 2]))
        return tape.gradient(loss, value)

    return (tf.function(gradient) if graph else gradient)().numpy()[:, 0].tolist()


@pytest.mark.both_backends
@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
def test_a_result_of_which_rows_are_used(several_ranks: Pool, graph: bool) -> None:
    size = several_ranks.size
    assert several_ranks.run(body_rows_of_the_result, graph) == [[2.0 * size, 0.0, 1.0 * size]] * size
