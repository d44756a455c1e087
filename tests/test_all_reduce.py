"""``npu.distribute.all_reduce`` against numpy, on 1, 2 and 3 ranks. ``test_collective_numbers.py`` has the
operation behind it with every dtype.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from collective_bodies import wrong_refusals
from pool import Pool

import npu_device as npu
from npu_device.distribute import hccl_ops

pytestmark = pytest.mark.both_engines


def body_kinds() -> dict[str, Any]:
    rank = npu.open().worker_id
    own = rank + 1.0
    reduce = npu.distribute.all_reduce
    single = reduce(np.float32(own), "sum")
    many = reduce((tf.constant([own]), None, np.array([[own, 2.0]]), 3, own), "sum")
    matrix = tf.ones([2, 2]) * own
    mixed = reduce([matrix, None, tf.constant([rank, 1], tf.int64)], reduction="mean")
    nested = reduce({"loss": own, "rest": [tf.constant(rank), None]}, "sum")
    empty = reduce([tf.zeros([0, 3]), tf.zeros([0])], "sum")
    narrow = tf.cast(own, tf.bfloat16)
    variable = tf.Variable(narrow)
    npu.distribute.broadcast(variable)
    bfloat16 = [
        reduce(narrow, "sum"),
        hccl_ops.broadcast([narrow], 0)[0],
        npu.distribute.weighted_mean(narrow, 1),
    ]
    return {
        "bfloat16 scalars": [float(each) for each in (*bfloat16, variable)],
        "single": float(single),
        "several": [None if value is None else np.asarray(value).tolist() for value in many],
        "types": [type(many).__name__, type(mixed).__name__],
        "nested": (float(nested["loss"]), int(nested["rest"][0]), nested["rest"][1]),
        "mixed": [None if value is None else np.asarray(value).tolist() for value in mixed],
        "nothing": reduce([], "sum"),
        "one id": [float(reduce(value, "sum", fusion=2, fusion_id=1)) for value in (own, own + 1)],
        "empty": [tuple(value.shape) for value in empty],
    }


def test_scalars_lists_and_16_bits_are_reduced_in_their_structure(ranks: Pool) -> None:
    n = ranks.size
    total = n * (n + 1) / 2
    for result in ranks.run(body_kinds):
        assert result["single"] == total
        assert result["bfloat16 scalars"] == [total, 1, total / n, 1]
        assert result["several"] == [[total], None, [[total, 2.0 * n]], 3 * n, total]
        assert result["types"] == ["tuple", "list"]
        assert result["nested"] == (total, total - n, None)
        mean = total / n
        assert result["mixed"] == [[[mean, mean], [mean, mean]], None, [(n - 1) / 2, 1]]
        assert result["nothing"] == []
        assert result["one id"] == [total, total + n]
        assert result["empty"] == [(0, 3), (0,)]


def body_slices(reduction: str, length: int) -> Any:
    """The same gradient of a short table and of a long one."""
    rank = npu.open().worker_id
    rows, width = rank + 1, 50_000  # another number of rows on each rank
    shape = tf.constant([length, width], tf.int64)
    values, indices = (
        tf.fill([rows + 1, width], float(rank + 1)),
        tf.constant([0, *range(rows)], tf.int64),
    )

    @tf.function
    def in_graph(values: tf.Tensor, indices: tf.Tensor) -> tf.Tensor:
        return npu.distribute.all_reduce([tf.IndexedSlices(values, indices, shape)], reduction)[0]

    eager = npu.distribute.all_reduce(tf.IndexedSlices(values, indices, shape), reduction)
    none = npu.distribute.all_reduce(tf.IndexedSlices(values[:0], indices[:0], shape), reduction)
    found = []
    for slices in (eager, in_graph(values, indices), none):
        least, most = (
            tf.reduce_min(slices.values, 1).numpy(),
            tf.reduce_max(slices.values, 1).numpy(),
        )
        assert np.array_equal(least, most)
        found.append((slices.indices.numpy().tolist(), most.tolist()))
    return found


@pytest.mark.parametrize("length", [6, 1000])
@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_reduced_slices_have_the_rows_of_all_ranks_in_their_order(
    several_ranks: Pool, reduction: str, length: int
) -> None:
    """The rows of all ranks are returned in their order, as one process has them."""
    n = several_ranks.size
    indices = [index for rank in range(n) for index in (0, *range(rank + 1))]
    rows = [rank + 1.0 for rank in range(n) for _ in range(rank + 2)]
    rows = pytest.approx([row / n for row in rows] if reduction == "mean" else rows)
    for found in several_ranks.run(body_slices, reduction, length):
        assert found == [(indices, rows), (indices, rows), ([], [])]


def body_lookups(kind: str) -> list[Any]:
    """The gradient of lookups in a table: rows by the ranks together, and those of the whole batch in one process."""
    table = tf.Variable(np.random.default_rng(1).normal(size=[5, 2]).astype(np.float32))
    words = np.random.default_rng(2).integers(1, 5, [12, 4])  # 0 is left out of sparse tensors

    def sums(words: tf.Tensor) -> tf.Tensor:
        found = []
        if "plain" in kind:
            found.append(tf.reduce_sum(tf.nn.embedding_lookup(table, words), 1))
        if "combined" in kind:  # as feature columns do
            weights = tf.sparse.from_dense(tf.ones(tf.shape(words))) if "weighted" in kind else None
            found.append(
                tf.nn.embedding_lookup_sparse(
                    table, tf.sparse.from_dense(words), weights, combiner="sum"
                )
            )
        return tf.add_n(found)

    def gradient(words: tf.Tensor, reduce: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(sums(words)))
        slices = reduce(tape.gradient(loss, table))
        order = tf.argsort(slices.indices, stable=True)
        return tf.gather(slices.indices, order), tf.gather(slices.values, order)

    together = tf.function(lambda words: gradient(words, npu.distribute.all_reduce))
    alone = tf.function(lambda words: gradient(words, lambda slices: slices))
    own = np.array_split(words, npu.distribute.size())[npu.distribute.rank()]
    return [
        [part.numpy() for part in call]
        for call in (together(tf.constant(own)), alone(tf.constant(words)))
    ]


@pytest.mark.parametrize("kind", ["combined", "weighted combined", "plain and combined"])
def test_lookups_have_the_rows_that_one_process_has(several_ranks: Pool, kind: str) -> None:
    """A lookup with a combiner has one row for each index of the whole batch, a plain one one for each occurrence."""
    for together, alone in several_ranks.run(body_lookups, kind):
        np.testing.assert_array_equal(together[0], alone[0])
        np.testing.assert_allclose(together[1], alone[1], rtol=1e-5, atol=1e-6)


def body_compressed_slices(length: int) -> list[list[float]]:
    """Values that bfloat16 rounds to 1. Of a short table, the ranks send the dense sum for an optimizer of tf-keras."""
    slices = tf.IndexedSlices(
        tf.fill([2, 1], 1 + 2.0**-12), tf.constant([0, 1]), tf.constant([length, 1])
    )
    in_graph = tf.function(
        lambda values: npu.distribute.all_reduce(values, "sum", compression="bf16")
    )
    found = [npu.distribute.all_reduce(slices, "sum", compression="bf16"), in_graph(slices)]
    wrap, options = (
        npu.distribute.npu_distributed_keras_optimizer_wrapper,
        {"fusion": 2, "fusion_id": 5},
    )
    table = tf.Variable(tf.zeros([length, 1]))
    wrap(tf.keras.optimizers.SGD(1.0), **options, compression="bf16").apply_gradients(
        [(slices, table)]
    )
    return [[float(row) for row in tf.convert_to_tensor(each)[:2, 0]] for each in (*found, -table)]


@pytest.mark.more_engines("tcp", "mpi", length=[1000])
@pytest.mark.parametrize("length", [2, 1000])
def test_compressed_slices_are_summed_in_full_precision(several_ranks: Pool, length: int) -> None:
    n = several_ranks.size
    assert several_ranks.run(body_compressed_slices, length) == [[[n, n], [n, n], [1.0, 1.0]]] * n


def body_gradient_through_control_flow() -> list[list[float]]:
    """Sums and gradients of a sum in a branch, and of three in a loop, whose iterations reduce other numbers, too; the
    tape is outside of them.
    """

    def reduce(value: tf.Tensor) -> tf.Tensor:
        return npu.distribute.all_reduce(value, "sum")

    def branch(value: tf.Tensor) -> tf.Tensor:
        return tf.cond(value[0] > 0, lambda: reduce(value), lambda: value)

    def loop(value: tf.Tensor) -> tf.Tensor:
        def body(step: tf.Tensor, value: tf.Tensor, steps: tf.Tensor) -> Any:
            return step + 1, reduce(value), steps + reduce(tf.cast(step, tf.float32))

        _, value, steps = tf.while_loop(
            lambda step, *_: step < 3, body, (0, value, 0.0), parallel_iterations=10
        )
        return value + steps

    def gradient(value: tf.Tensor, function: Any) -> tuple[tf.Tensor, tf.Tensor]:
        with tf.GradientTape() as tape:
            tape.watch(value)
            result = function(value)
        return result[-1], tape.gradient(result, value)[-1]

    traced = tf.function(gradient, autograph=False)
    return [[float(one) for one in traced(tf.ones([3]), function)] for function in (branch, loop)]


def test_gradients_pass_through_reductions_in_branches_and_loops(ranks: Pool) -> None:
    n = ranks.size
    assert ranks.run(body_gradient_through_control_flow) == [[[n, n], [n**3 + 3 * n, n**3]]] * n


def body_refusals() -> list[str]:
    reduce, one = npu.distribute.all_reduce, tf.constant(1.0)
    cases: list[tuple[Any, ...]] = [
        ("ValueError", "0 (each tensor alone)", partial(reduce, one, fusion=3)),
        ("ValueError", "fusion_id 4", partial(reduce, one, fusion=1, fusion_id=4)),
    ]
    if npu.distribute.size() > 1:
        reduce(
            tf.IndexedSlices(np.ones([1, 2]), np.array([0]), (4, 2))
        )  # arrays of numpy are accepted
        cases += [
            ("ValueError", "'sum', 'mean'", reduce, one, "median"),
            ("TypeError", "string", reduce, tf.constant("text"), "sum"),
            ("TypeError", "bool", reduce, tf.constant(True), "max"),
            ("ValueError", "nobody", partial(reduce, one, group="nobody")),
            (
                "ValueError",
                "IndexedSlices",
                reduce,
                tf.IndexedSlices(tf.ones([1, 2]), tf.constant([0])),
                "max",
            ),
            (
                "TypeError: all_reduce",
                "a SparseTensor; expected tensors",
                reduce,
                {"a": tf.sparse.from_dense([1.0])},
            ),
            (
                "TypeError: all_reduce",
                "a RaggedTensor",
                reduce,
                [tf.ragged.constant([[1.0], [2.0, 3.0]])],
            ),
        ]
    return wrong_refusals(*cases)


def test_bad_input_is_refused_with_a_reason(ranks: Pool) -> None:
    assert ranks.run(body_refusals) == [[]] * ranks.size


def body_loop_over_a_dataset() -> list[list[float]]:
    """Train in loops of AutoGraph, which are functions of a dataset, and leave the last one early."""
    rank, size = npu.distribute.rank(), npu.distribute.size()
    weight, steps = tf.Variable(1.0), tf.Variable(0.0)
    dataset, batch = npu.distribute.shard_and_rebatch_dataset(tf.data.Dataset.range(24), 12)
    model = tf.keras.Sequential(
        [tf.keras.Input([1]), tf.keras.layers.Dense(1, "tanh", False, "ones")]
    )
    optimizer = npu.distribute.npu_distributed_keras_optimizer_wrapper(
        tf.keras.optimizers.SGD(0.01)
    )
    optimizer.build(model.trainable_variables)

    @tf.function
    def epoch(data: Any, limit: float) -> Any:
        before = npu.distribute.all_reduce(tf.constant(1.0 + rank))
        total = tf.constant(0.0)
        for numbers in data:
            x = tf.cast(numbers, tf.float32)[:, tf.newaxis]
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(npu.distribute.all_reduce((weight - x) ** 2))
            with tf.GradientTape() as tape_of_model:
                loss_of_model = tf.reduce_mean((model(x) - x / 24) ** 2)
            weight.assign_sub(0.1 * npu.distribute.all_reduce(tape.gradient(loss, weight)))
            variables = model.trainable_variables
            gradients = tape_of_model.gradient(loss_of_model, variables)
            optimizer.apply_gradients(zip(gradients, variables))
            total += npu.distribute.all_reduce(loss)
            steps.assign_add(npu.distribute.all_reduce(tf.fill([3], 1.0), "max")[0])
            if steps >= limit:
                break
        after = npu.distribute.all_reduce([tf.fill([70_000], 2.0 * rank)], "max")[0][-1]
        return total, before - (size + 1) / 2, after - 2 * (size - 1)

    data = dataset.batch(batch)
    ends = [epoch(data, limit) for limit in (99.0, 99.0, 5.0)]
    assert int(steps) == 5
    numbers = [float(weight), *map(float, tf.reshape(model.trainable_variables[0], [-1]))]
    return [numbers, *([float(number) for number in end] for end in ends)]


@pytest.mark.more_engines("tcp", "mpi", "tensorflow")
def test_loops_over_datasets_in_functions(several_ranks: Pool, single: Pool) -> None:
    [alone] = single.run(body_loop_over_a_dataset)
    for found in several_ranks.run(body_loop_over_a_dataset):
        for numbers, expected in zip(found, alone):
            assert numbers == pytest.approx(expected, rel=1e-5, abs=1e-6)
