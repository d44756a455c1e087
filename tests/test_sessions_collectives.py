"""Collectives in graphs that a session runs: results, order, waiting threads, errors."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from caught_messages import error_of
from collective_bodies import REDUCTIONS, values
from pool import Pool

import npu_device as npu
from npu_device._src.collectives.sessions import call_python
from npu_device.distribute import hccl_ops

DTYPES = ("bfloat16", "float32", "int32", "uint16")


def operators(shape: tuple[int, ...]) -> dict[str, Any]:
    """Everything of hccl_ops on one array a rank, and npu.distribute.all_reduce of a list of all dtypes."""
    size, rank = npu.open().workers_num, npu.open().worker_id
    mine = values(rank, shape)
    with tf.Graph().as_default():
        fed = tf.compat.v1.placeholder(tf.float64, shape)
        one = tf.compat.v1.placeholder(tf.float64, [None])
        fetches: dict[str, Any] = {
            f"allreduce {r}": hccl_ops.allreduce(fed, r) for r in ("sum", "min", "max", "prod")
        }
        for reduction in REDUCTIONS:
            typed = [tf.cast(fed, dtype) for dtype in DTYPES]
            several = npu.distribute.all_reduce([*typed, None, typed[0]], reduction)
            assert several[len(DTYPES)] is None
            assert all(tensor.shape == shape for tensor in several if tensor is not None)
            for dtype, tensor in zip(DTYPES, several):
                fetches[f"{dtype} {reduction}"] = tf.cast(tensor, tf.float64)
        fetches["allgather"] = hccl_ops.allgather(one, size)
        fetches["broadcast"], fetches["broadcast 2"] = hccl_ops.broadcast([fed, one], size - 1)
        fetches["reduce"] = hccl_ops.reduce(fed, "sum", size - 1)
        fetches["reduce_scatter"] = hccl_ops.reduce_scatter(tf.tile(fed, [size, 1]), "sum", size)
        mine_to_each, counts = tf.range(size) + 10 * rank, tf.ones([size], tf.int64)
        fetches["all_to_all_v"] = hccl_ops.all_to_all_v(mine_to_each, *[counts, range(size)] * 2)
        fetches["all_to_all_v_c"] = hccl_ops.all_to_all_v_c(
            mine_to_each, np.ones([size, size]), rank
        )
        with tf.compat.v1.Session() as session:
            return session.run(fetches, {fed: mine, one: mine[0]})  # type: ignore[no-any-return]


def test_operators_in_sessions_give_the_results_of_every_rank(ranks: Pool) -> None:
    shape = (2, 3)
    everybody = [values(rank, shape) for rank in range(ranks.size)]
    last, gathered = everybody[-1], np.concatenate([value[0] for value in everybody])
    right: dict[str, Any] = {"allgather": gathered, "broadcast": last, "broadcast 2": last[0]}
    for reduction, of in REDUCTIONS.items():
        right |= {f"{kind} {reduction}": of(everybody, axis=0) for kind in ("allreduce", *DTYPES)}
    for rank, results in enumerate(ranks.run(operators, shape)):
        right["all_to_all_v"] = right["all_to_all_v_c"] = [
            10 * sender + rank for sender in range(ranks.size)
        ]
        right["reduce_scatter"] = np.sum(everybody, axis=0)
        right["reduce"] = right["reduce_scatter"] * (rank == ranks.size - 1)
        for name, found in results.items():
            np.testing.assert_allclose(
                found, right[name], rtol=0.01 if "bfloat16" in name else 1e-6, err_msg=name
            )


def in_opposite_orders(count: int) -> list[float]:
    """Independent operations, which each rank's data make ready in another order, with one thread for all."""
    rank = npu.open().worker_id
    config = tf.compat.v1.ConfigProto(
        inter_op_parallelism_threads=1, intra_op_parallelism_threads=1
    )
    with tf.Graph().as_default():
        before = tf.constant(float(rank))
        ready: dict[int, Any] = {}
        for place in range(count) if rank == 0 else reversed(range(count)):
            with tf.control_dependencies([before]):
                before = ready[place] = tf.constant(float(place)) + 0.0
        sums = [npu.distribute.all_reduce(ready[place], "sum") for place in range(count)]
        with tf.compat.v1.Session(config=config) as session:
            session.run(sums)
            return session.run(sums)  # type: ignore[no-any-return]


@pytest.mark.more_engines("tcp", "mpi")
def test_opposite_orders_with_one_thread(several_ranks: Pool) -> None:
    for results in several_ranks.run(in_opposite_orders, 7):
        assert results == [several_ranks.size * place for place in range(7)]


def send_both_ways() -> np.ndarray:
    rank, other = npu.open().worker_id, 1 - npu.open().worker_id
    with tf.Graph().as_default():
        sent = hccl_ops.send(tf.fill([2], rank + 1.0), 5, other)
        assert isinstance(sent, tf.Operation)
        with tf.control_dependencies([sent] if rank else []):
            received = hccl_ops.receive([2], tf.float32, 5, other)
        with tf.compat.v1.Session() as session:
            return session.run([received, sent])[0]


def test_two_ranks_send_to_each_other_in_one_session_run(two_ranks: Pool) -> None:
    first, second = two_ranks.run(send_both_ways)
    assert (first.tolist(), second.tolist()) == ([2.0, 2.0], [1.0, 1.0])


def gradient(kind: str) -> Any:
    rank = npu.open().worker_id
    with tf.Graph().as_default():
        x = tf.constant([1.0, 2.0]) * (rank + 1.0)
        if kind == "broadcast":
            [y] = npu.distribute.hccl_ops.broadcast([x], 0)
        else:
            y = npu.distribute.all_reduce([x, x * 3.0], kind)[1]
        [slope] = tf.gradients(tf.reduce_sum(y * (rank + 1.0)), x)
        with tf.compat.v1.Session() as session:
            return session.run(slope).tolist()


def test_sums_have_gradients_in_sessions_and_maxima_none(two_ranks: Pool) -> None:
    for kind, expected in (("sum", 9.0), ("mean", 4.5)):
        assert two_ranks.run(gradient, kind) == [[expected] * 2] * 2
    for kind in ("max", "broadcast"):
        with pytest.raises(AssertionError, match=r"LookupError: .* has no gradient"):
            two_ranks.run(gradient, kind)


def mismatch() -> tuple[str, list[float]]:
    rank = npu.open().worker_id
    with tf.Graph().as_default():
        wrong = npu.distribute.all_reduce(tf.zeros([2 + rank], name="weights"), "sum")
        right = npu.distribute.all_reduce(tf.ones([2]), "sum")
        with tf.compat.v1.Session() as session:
            return error_of(session.run, wrong), session.run(right).tolist()


@pytest.mark.more_engines("tcp", "mpi")
def test_a_mismatch_is_an_error_of_run_and_the_session_goes_on(several_ranks: Pool) -> None:
    size = several_ranks.size
    for message, after in several_ranks.run(mismatch):
        for rank in range(size):
            assert f"rank {rank} on host" in message
            assert f"weights:0: float32 [{2 + rank}]" in message
        assert "test_sessions_collectives.py" in message  # the line that made the operation
        assert "What to do:" in message
        assert after == [size] * 2


def a_subset_sparse_and_branches() -> tuple[Any, ...]:
    """Some operations of a graph, IndexedSlices, a branch and a loop."""
    rank = npu.open().worker_id
    with tf.Graph().as_default():
        never_fed = tf.compat.v1.placeholder(tf.float32, [])
        npu.distribute.all_reduce([never_fed], "sum")
        slices = tf.IndexedSlices(
            tf.ones([2, 3]), tf.constant([rank, 5], tf.int64), tf.constant([8, 3], tf.int64)
        )
        reduced = npu.distribute.all_reduce([slices], "sum")[0]
        one, zero = tf.constant(1.0), tf.constant(0.0)
        branch = tf.cond(
            tf.constant(True), lambda: npu.distribute.all_reduce(one, "sum"), lambda: zero
        )
        npu.distribute.all_reduce(never_fed, "sum")
        _, looped = tf.while_loop(
            lambda step, _: step < 3,
            lambda step, total: (step + 1, npu.distribute.all_reduce(total, "sum")),
            [tf.constant(0), tf.constant(1.0)],
        )
        with tf.compat.v1.Session() as session:
            dense = tf.convert_to_tensor(reduced)
            return (
                session.run(dense)[:, 0].tolist(),
                float(session.run(branch)),
                float(session.run(looped)),
            )


def test_a_subset_of_sparse_gradients_branches_and_loops(ranks: Pool) -> None:
    size = ranks.size
    rows = [1.0 * (row < size) + size * (row == 5) for row in range(8)]
    assert ranks.run(a_subset_sparse_and_branches) == [(rows, float(size), float(size**3))] * size


def overlap() -> bool:
    """The first segment is reduced while the second one's gradient is still being made."""
    first_is_there = threading.Event()

    def wait(value: np.ndarray) -> list[np.ndarray]:
        return [np.array(float(first_is_there.wait(20)) + 0 * value, np.float32)]

    def tell(value: np.ndarray) -> list[np.ndarray]:
        first_is_there.set()
        return [value]

    config = tf.compat.v1.ConfigProto(inter_op_parallelism_threads=1)
    spec = tf.TensorSpec([], tf.float32)
    with tf.Graph().as_default():
        early = tf.constant(2.0)
        [late] = call_python(wait, [early], [spec])
        sums = npu.distribute.all_reduce([late, early], "sum", fusion=0)
        [told] = call_python(tell, [sums[1]], [spec])
        with tf.compat.v1.Session(config=config) as session:
            return session.run([sums[0], told])[0] == npu.open().workers_num


def test_segments_travel_while_backward_runs(two_ranks: Pool) -> None:
    assert two_ranks.run(overlap) == [True, True]


def broadcasts(size: int) -> dict[str, Any]:
    v1, rank = tf.compat.v1, npu.open().worker_id
    found: dict[str, Any] = {}
    for kind in ("resource", "reference"):
        with tf.Graph().as_default(), v1.Session() as session:
            value, resource = tf.constant([1.0, 2.0]) * (rank + 1), kind == "resource"
            made = [
                v1.get_variable(name, initializer=value, use_resource=resource)
                for name in ("a", "b", "c")
            ]
            session.run(v1.global_variables_initializer())
            session.run(hccl_ops.broadcast(v1.trainable_variables()[:1], size - 1))
            outputs = hccl_ops.broadcast([made[1]], size - 1)
            session.run(v1.assign(made[1], outputs[0]))
            assert outputs[0].op is not None
            before = session.run(made[2]).tolist()
            session.run(outputs[0].op)
            session.run(npu.distribute.broadcast([made[2]], 0))
            found[kind] = (before, *(value.tolist() for value in session.run(made)))
    return found


def test_broadcast_overwrites_variables(ranks: Pool) -> None:
    size = ranks.size
    last = [1.0 * size, 2.0 * size]
    for rank, found in enumerate(ranks.run(broadcasts, size)):
        mine = [1.0 * (rank + 1), 2.0 * (rank + 1)]
        for kind in ("resource", "reference"):
            assert found[kind] == (mine, last, last, [1.0, 2.0]), kind


def body_many() -> list[float]:
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        values = [
            tf.fill([3], float(npu.open().worker_id + i)) for i in range(66)
        ]  # more than one order holds
        sums = [hccl_ops.allreduce(value, "sum", fusion=2, fusion_id=3) for value in values]
        return [float(value[0]) for value in session.run(sums)]


def test_many_calls_with_one_id(two_ranks: Pool) -> None:
    assert two_ranks.run(body_many) == [[2.0 * i + 1 for i in range(66)]] * 2
