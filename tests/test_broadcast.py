"""``npu.distribute.broadcast``: variables of every kind, in place, from any root."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from collective_bodies import wrong_refusals
from pool import Pool
from rank_comparison import same_bits

import npu_device as npu
from npu_device._src.collectives.engines.tensorflow.engine import TRANSFER_BYTES

FLOATS = ("float16", "bfloat16", "float32", "float64", "complex64", "complex128")
INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
DTYPES = (*FLOATS, *INTEGERS, "bool")


def body_variables(root: int) -> None:
    rank = npu.distribute.rank()
    variables = [
        tf.Variable(tf.cast(tf.fill([5], rank + 1 if dtype != "bool" else rank % 2), dtype))
        for dtype in DTYPES
    ]
    odd = tf.Variable(tf.cast(tf.range(3) + rank, tf.int8))
    scalar, alone = tf.Variable(float(rank)), tf.Variable(rank)
    matrix, empty = tf.Variable(tf.fill([2, 3], float(rank))), tf.Variable(tf.zeros([0, 2]))
    npu.distribute.broadcast([*variables, odd, scalar], root_rank=root)
    npu.distribute.broadcast({"matrix": matrix, "rest": [empty]}, root)
    npu.distribute.broadcast(alone, root)
    npu.distribute.broadcast([], root_rank=root)
    for dtype, variable in zip(DTYPES, variables):
        assert (
            tf.cast(variable, tf.float32).numpy() == (root % 2 if dtype == "bool" else root + 1)
        ).all(), dtype
    assert odd.numpy().tolist() == [root, root + 1, root + 2]
    assert float(scalar) == int(alone) == root and (matrix.numpy() == root).all()


@pytest.mark.parametrize("last", [False, True], ids=["from first", "from last"])
def test_every_dtype_from_any_root(ranks: Pool, last: bool) -> None:
    ranks.run(body_variables, ranks.size - 1 if last else 0)


def body_models() -> Any:
    tf.keras.utils.set_random_seed(npu.distribute.rank())
    model = tf.keras.Sequential(
        [tf.keras.Input([4]), tf.keras.layers.Dense(8), tf.keras.layers.BatchNormalization()]
    )
    before = model.get_weights()
    npu.distribute.broadcast(model.trainable_variables, root_rank=0)
    after = model.get_weights()
    tf.function(lambda: npu.distribute.broadcast(model.trainable_variables))()
    return before, after, model.get_weights()


def test_a_broadcast_keras_model_has_the_same_bits_on_every_rank(keras_two_ranks: Pool) -> None:
    (root, *sent), (before, *received) = keras_two_ranks.run(body_models)
    assert not np.array_equal(before[0], root[0]), (
        "the ranks must start from other weights for the test to mean much"
    )
    same_bits(root, *sent, *received)


def body_transfers() -> tuple[int, int]:
    rank = npu.distribute.rank()
    variables = [tf.Variable(tf.fill([1000], float(rank))) for _ in range(60)]
    send = tf.function(lambda: npu.distribute.broadcast(variables))
    kinds = [op.type for op in send.get_concrete_function().graph.get_operations()]
    half = TRANSFER_BYTES // 4 // 2 + 1
    large = [tf.Variable(tf.fill([half], float(rank))), tf.Variable(tf.fill([half], 2.0 * rank))]
    npu.distribute.broadcast(large)
    assert all(float(tf.reduce_max(tf.abs(value))) == 0.0 for value in large)
    # Calls: in shared memory the transfer; else the agreement, and the transfer or its key.
    return sum(kind.startswith("CollectiveBcast") for kind in kinds), kinds.count("PyFuncStateless")


@pytest.mark.both_engines
def test_many_variables_take_few_transfers(two_ranks: Pool, engine: str) -> None:
    expected = {"shared_memory": (0, 1), "tensorflow": (1, 2)}.get(engine, (0, 2))
    assert two_ranks.run(body_transfers) == [expected] * 2


def body_refusals() -> list[str]:
    broadcast, variable = npu.distribute.broadcast, tf.Variable(1.0)
    cases: list[tuple[Any, ...]] = [
        ("ValueError", "fusion", partial(broadcast, [variable], fusion=1))
    ]
    if npu.distribute.size() > 1:
        cases += [
            ("TypeError", "number 1 of the 2 values", broadcast, [variable, tf.constant(1.0)]),
            ("ValueError", "root_rank 7", broadcast, [variable], 7),
            ("TypeError", "string", broadcast, tf.Variable("text")),
        ]
    return wrong_refusals(*cases)


def test_bad_input_is_refused_with_a_reason(ranks: Pool) -> None:
    assert ranks.run(body_refusals) == [[]] * ranks.size
