"""Gradients of the collectives, of first and second order.

Every rank has a loss of its own; the gradient of a rank's input is that of the sum of all ranks' losses. Each operation
is ``f(x) = J x``, also the maximum, so that for any ``u`` the gradient ``g`` of ``sum(u * f(x))`` has ``sum(g * x) =
sum(u * f(x))``, both added up over the ranks, and the gradient of ``sum(g * x)`` for ``u`` is ``f(x)``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from collective_bodies import apart, counts, group, in_graph
from pool import Pool

import npu_device as npu
from npu_device._src.collectives.moves import all_gather, all_gather_v, all_to_all_v, all_to_all_vc
from npu_device._src.collectives.ops import all_reduce, broadcast, reduce, reduce_scatter


def body_gradients(mode: str) -> dict[str, list[Any]]:
    """For each operation: the sums of ``g * x`` and ``u * f(x)`` on this rank, f(x), and the second gradient."""
    job, mine = group("world")
    size, me = mine.size, mine.rank
    matrix = counts(size)
    row, column = matrix[me], matrix[:, me]
    calls = {
        "all_gather": lambda x: all_gather(job, x, mine),
        "all_gather_v": lambda x: all_gather_v(job, x[: me + 1], mine),
        "all_to_all_v": lambda x: all_to_all_v(
            job, x, row, apart(row), column, apart(column), mine
        ),
        "all_to_all_vc": lambda x: all_to_all_vc(job, x, matrix, mine),
        "broadcast": lambda x: broadcast(job, [x], size - 1, mine)[0],
        "reduce_scatter max": lambda x: reduce_scatter(job, x, "max", mine),
    }
    for how in ("sum", "mean"):
        calls[f"all_reduce {how}"] = lambda x, how=how: all_reduce(job, x, how, mine)
        calls[f"reduce {how}"] = lambda x, how=how: reduce(job, x, how, size - 1, mine)
        calls[f"reduce_scatter {how}"] = lambda x, how=how: reduce_scatter(job, x, how, mine)

    def derivatives(call: Any, x: Any) -> list[Any]:
        with tf.GradientTape() as outer:
            with tf.GradientTape() as tape:
                tape.watch(x)
                result = call(x)
                u = tf.random.stateless_normal(tf.shape(result), [me, 2])
                outer.watch(u)
                # Picked rows, so that the gradient comes back as ``tf.IndexedSlices``.
                loss = tf.reduce_sum(u * tf.gather(result, tf.range(tf.size(result))))
            along = tf.reduce_sum(tape.gradient(loss, x) * x)
        return [along, loss, result, outer.gradient(along, u)]

    found = {}
    for name, call in calls.items():
        arguments = (call, tf.random.stateless_normal([6 * size], [me, 1]))
        if mode == "graph":
            values = in_graph(derivatives)(*arguments)
        elif mode == "tapes outside":
            values = derivatives(in_graph(call), arguments[1])
        else:
            values = derivatives(*arguments)
        found[name] = [value.numpy() for value in values]
    return found


@pytest.mark.both_engines
@pytest.mark.parametrize("mode", ["graph", "tapes outside", "eager"])
def test_gradients_of_collectives_agree_with_finite_differences(
    several_ranks: Pool, mode: str
) -> None:
    found = several_ranks.run(body_gradients, mode)
    for name in found[0]:
        along, losses, results, seconds = zip(*(ranks[name] for ranks in found))
        assert sum(along) == pytest.approx(sum(losses), rel=1e-4, abs=1e-4), name
        for result, second in zip(results, seconds):
            assert result.any() or name.startswith("reduce ")
            np.testing.assert_allclose(second, result, rtol=1e-4, atol=1e-5, err_msg=name)


def body_tape_outside() -> None:
    """Compare gradients of eager calls with those of a function, whose gradient is a function that TensorFlow makes."""
    job, mine = group("world")
    x = tf.reshape(tf.range(8.0), [4, 2])
    normalization = npu.distribute.SyncBatchNormalization()
    normalization(x, training=True)

    def sent(x: tf.Tensor, root_rank: int) -> tf.Tensor:
        return broadcast(job, [x], root_rank, mine)[0]

    def several_tensors(x: tf.Tensor) -> tf.Tensor:
        """Return a sum whose gradient tells if the tensors of a rank get those of others."""
        factors = range(1, 17)
        tensors = broadcast(job, [x * factor for factor in factors], 1, mine)
        return tf.add_n([factor * tensor for factor, tensor in zip(factors, tensors)])

    calls = {
        "branch": lambda x: tf.cond(x[0, 0] > -1, lambda: sent(x, 0) * 2, lambda: x),
        "loop": lambda x: tf.while_loop(
            lambda step, _: step < 3, lambda step, y: (step + 1, sent(y, 1) * 2 + y), [0, x]
        )[1],
        "function": lambda x: in_graph(lambda y: sent(y * 2, 0))(x) + 1,
        # Nothing but their order keeps these apart.
        "several": lambda x: sent(x, 0) + sent(x * 2, 1) + all_reduce(job, x, "sum", mine),
        "several tensors": several_tensors,
        # Four that could be mistaken for each other.
        "branches": lambda x: tf.add_n(
            [
                tf.cond(x[0, 0] > -1, lambda: sent(x, 0) * 2, lambda: x) + sent(x, 0) * 3,
                tf.cond(x[0, 0] > -1, lambda: sent(x, 0) * 4, lambda: x) + sent(x, 0) * 5,
            ]
        ),
        "layer": lambda x: normalization(x, training=True) * tf.range(2.0),
    }

    def gradient(call: Any) -> tf.Tensor:
        with tf.GradientTape() as tape:
            tape.watch(x)
            # Each rank's loss is another one.
            loss = tf.reduce_sum(call(x)) * (mine.rank + 1)
        return tape.gradient(loss, x)

    for name, call in calls.items():
        expected = gradient(call)
        for shape in (x.shape, [None, None]):
            function = in_graph(call, input_signature=[tf.TensorSpec(shape)])
            tf.debugging.assert_near(gradient(function), expected, message=name)
            nested = in_graph(lambda function=function: gradient(function))()
            tf.debugging.assert_near(nested, expected, message=name)


@pytest.mark.both_engines
@pytest.mark.more_engines("tcp")
def test_a_tape_outside_of_a_function_gets_gradients_of_all_that_it_calls(two_ranks: Pool) -> None:
    two_ranks.run(body_tape_outside)
