"""Ascend's operators: signatures of both adapters, results on 1, 2 and 3 ranks, what is refused."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from collective_bodies import wrong_refusals
from pool import Pool

import npu_device as npu
from npu_bridge.hccl import hccl_ops as old
from npu_device.distribute import hccl_ops

GROUP = "group='hccl_world_group'"
SIGNATURES = {
    "allreduce": f"(tensor, reduction, fusion=1, fusion_id=-1, {GROUP})",
    "allgather": f"(tensor, rank_size, {GROUP}, fusion=0, fusion_id=-1)",  # TensorFlow 2's adapter lacks the last two
    "broadcast": f"(tensor, root_rank, fusion=2, fusion_id=0, {GROUP})",
    "reduce": f"(tensor, reduction, root_rank, fusion=0, fusion_id=-1, {GROUP})",
    "reduce_scatter": f"(tensor, reduction, rank_size, {GROUP}, fusion=0, fusion_id=-1)",  # so here
    "send": f"(tensor, sr_tag, dest_rank, {GROUP})",
    "receive": f"(shape, data_type, sr_tag, src_rank, {GROUP})",
    "all_to_all_v": f"(send_data, send_counts, send_displacements, recv_counts, recv_displacements, {GROUP})",
    "all_to_all_v_c": f"(send_data, send_count_matrix, rank, fusion=0, fusion_id=-1, {GROUP})",
    "gather_all_to_all_v": "(addrinfo, addrinfo_count_per_rank, recv_counts, recv_displacements, dtype, addr_length, "
    f"{GROUP})",
    "remote_read": "(tensorRemote, data_type)",
    "remote_ref_read": "(tensorRemote, cache, offset)",
    "remote_write": "(tensorRemote, tensorLocal, data_type)",
    "remote_scatter_write": "(tensorRemote, tensorLocal, offset)",
}


def test_signatures_are_those_of_ascend() -> None:
    for name, expected in SIGNATURES.items():
        signature = inspect.signature(getattr(hccl_ops, name))
        bare = [
            parameter.replace(annotation=inspect.Parameter.empty)
            for parameter in signature.parameters.values()
        ]
        assert str(inspect.Signature(bare)) == expected, name
    assert hccl_ops.alltoallv is hccl_ops.all_to_all_v
    assert hccl_ops.alltoallvc is hccl_ops.all_to_all_v_c
    for ops in (hccl_ops, old):
        public = {
            name: each
            for name, each in vars(ops).items()
            if name.isidentifier() and not name.startswith("_")
        }
        assert public == {
            name: getattr(hccl_ops, name) for name in (*SIGNATURES, "alltoallv", "alltoallvc")
        }


def body_results(mode: str) -> Any:
    ops, rank, size = hccl_ops, npu.distribute.rank(), npu.distribute.size()
    twos, places = [2] * size, range(0, 2 * size, 2)

    def operations(own: tf.Tensor) -> list[Any]:
        with tf.GradientTape() as tape:
            tape.watch(own)
            total = ops.allreduce(own * (rank + 1.0), "sum")
        return [
            tape.gradient(total, own),
            ops.allreduce(own, "sum"),
            ops.allreduce(own, "max", 2, 7),
            ops.allgather(own, size),
            *ops.broadcast([own, own + 1], 0, 2, 0),
            ops.reduce(own, "sum", 0, 2, 1),
            ops.reduce_scatter(tf.tile(own, [size]), "prod", size),
            ops.all_to_all_v(tf.tile(own, [size]), twos, places, twos, places),
            ops.alltoallvc(tf.tile(own, [size]), [[1] * size] * size, rank),
        ]

    call = tf.function(operations) if mode == "graph" else operations
    variable = tf.Variable([5.0, 6.0])
    [value] = ops.broadcast([variable], root_rank=0)
    assert (value is variable) == (size == 1)
    x = [1, 2]
    assert (ops.allreduce(x, "sum") is x) == (size == 1)
    return [value.numpy() for value in call(tf.constant([rank + 1.0, rank + 2.0]))]


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_hccl_operators_give_the_results_of_ascend(ranks: Pool, mode: str) -> None:
    n = ranks.size
    everybody = np.array([[rank + 1.0, rank + 2.0] for rank in range(n)])
    total = everybody.sum(axis=0)
    for rank, found in enumerate(ranks.run(body_results, mode)):
        expected = [
            [(rank + 1.0) * n] * 2,
            total,
            everybody.max(axis=0),
            everybody.reshape(-1),
            everybody[0],
            everybody[0] + 1,
            total if rank == 0 else 0 * total,
            everybody.prod(axis=0),
            everybody.reshape(-1),
            everybody[:, rank % 2],
        ]
        for array, right in zip(found, expected):
            np.testing.assert_allclose(array, right)


def body_refusals() -> list[str]:
    rank, size = npu.open().worker_id, npu.open().workers_num
    one, ones, two, value = tf.ones([size]), [1] * size, tf.ones([2 * size]), "ValueError"
    exchange, places, twos, places2 = (
        hccl_ops.all_to_all_v,
        range(size),
        [2] * size,
        range(0, 2 * size, 2),
    )
    cases: list[tuple[Any, ...]] = [
        (value, "npu.distribute.all_reduce knows 'mean'", hccl_ops.allreduce, one, "mean"),
        (value, "'sum', 'max', 'min', 'prod'", hccl_ops.reduce, one, "median", 0),
        (value, "expected 0", hccl_ops.reduce, one, "sum", 0, 1),
        (value, "fusion_id -1", old.allgather, one, size, "hccl_world_group", 2, -1),
        (value, f"rank_size {size + 1}", hccl_ops.allgather, one, size + 1),
        ("TypeError", "[tensor]", hccl_ops.broadcast, one, 0),
        ("NotImplementedError", "What to do", hccl_ops.remote_read, one, tf.float32),
        (
            "NotImplementedError",
            "all_to_all_v",
            old.gather_all_to_all_v,
            one,
            one,
            one,
            one,
            tf.float32,
            4,
        ),
        (value, "expected", hccl_ops.all_to_all_v_c, one, [ones] * size, size),
        (value, "send_counts must not be negative", exchange, one, [-1] * size, *[[0] * size] * 3),
        (value, f"expected ({size},)", exchange, one, [*ones, 1], [0] * size, ones, [0] * size),
        (value, f"there are {size}", exchange, one, ones, [size] * size, ones, places),
        (value, "send_count_matrix", hccl_ops.all_to_all_v_c, one, ones, rank),
    ]
    if size == 1:
        return wrong_refusals(*cases, (value, "single device", hccl_ops.send, one, 0, 0))
    return wrong_refusals(
        *cases,
        (value, "overlap at element 0", exchange, one, ones, places, ones, [0] * size),
        (
            f"ValueError: root_rank {size} ",
            f"expected 0 to {size - 1}",
            hccl_ops.broadcast,
            [one],
            size,
        ),
        (
            value,
            "must be a multiple of rank_size",
            hccl_ops.reduce_scatter,
            tf.ones([size + 1]),
            "sum",
            size,
        ),
        (value, "tf.newaxis", hccl_ops.allgather, 1.0, size),
        (value, "nobody", hccl_ops.allreduce, one, "sum", 1, -1, "nobody"),
        ("TypeError", "bool", hccl_ops.reduce_scatter, tf.ones([size], tf.bool), "max", size),
        (
            value,
            "group rank 1 sends 1 to rank 0, which expects 2",
            exchange,
            two,
            ones,
            [0] * size,
            twos,
            places2,
        ),
    )


def test_hccl_operators_refuse_wrong_arguments_on_every_rank(ranks: Pool) -> None:
    assert ranks.run(body_refusals) == [[]] * ranks.size
