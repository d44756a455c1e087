"""Ascend's operators: signatures of both adapters, results on 1, 2 and 3 ranks, what is refused."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from pool import Pool

import npu_device as npu

GROUP = "group='hccl_world_group'"
SAME = {
    "allreduce": f"(tensor, reduction, fusion=1, fusion_id=-1, {GROUP})",
    "broadcast": f"(tensor, root_rank, fusion=2, fusion_id=0, {GROUP})",
    "reduce": f"(tensor, reduction, root_rank, fusion=0, fusion_id=-1, {GROUP})",
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
# The TensorFlow 2 adapter's lack the last two arguments.
SIGNATURES = {
    **SAME,
    "allgather": f"(tensor, rank_size, {GROUP}, fusion=0, fusion_id=-1)",
    "reduce_scatter": f"(tensor, reduction, rank_size, {GROUP}, fusion=0, fusion_id=-1)",
}


@pytest.mark.parametrize("module", ["npu_device.distribute", "npu_bridge.hccl"])
def test_signatures(module: str) -> None:
    ops = getattr(__import__(module, fromlist=["hccl_ops"]), "hccl_ops", None)
    if ops is None:
        ops = __import__(f"{module}.hccl_ops", fromlist=["hccl_ops"])
    for name, expected in SIGNATURES.items():
        signature = inspect.signature(getattr(ops, name))
        bare = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in signature.parameters.values()]
        assert str(inspect.Signature(bare)) == expected, name
    assert ops.alltoallv is ops.all_to_all_v
    assert ops.alltoallvc is ops.all_to_all_v_c
    assert set(ops.__all__) == {*SIGNATURES, "alltoallv", "alltoallvc"}


def body_results(flavour: str, mode: str) -> Any:
    import importlib

    ops = importlib.import_module(flavour)
    handle = npu.open()
    rank, size = handle.worker_id, handle.workers_num

    def operations(own: tf.Tensor) -> list[Any]:
        return [
            ops.allreduce(own, "sum"),
            ops.allreduce(own, "max", 2, 7),
            ops.allgather(own, size),
            *ops.broadcast([own, own + 1], 0, 2, 0),
            ops.reduce(own, "sum", 0, 2, 1),
            ops.reduce_scatter(tf.tile(own, [size]), "prod", size),
            ops.all_to_all_v(
                tf.tile(own, [size]), [2] * size, range(0, 2 * size, 2), [2] * size, range(0, 2 * size, 2)
            ),
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
@pytest.mark.parametrize("flavour", ["npu_device.distribute.hccl_ops", "npu_bridge.hccl.hccl_ops"])
def test_results(ranks: Pool, flavour: str, mode: str) -> None:
    n = ranks.size
    everybody = np.array([[rank + 1.0, rank + 2.0] for rank in range(n)])
    total = everybody.sum(axis=0)
    for rank, found in enumerate(ranks.run(body_results, flavour, mode)):
        expected = [
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


def body_gradient() -> list[float]:
    from npu_device.distribute import hccl_ops

    rank = npu.open().worker_id
    x = tf.Variable([1.0, 2.0])
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(hccl_ops.allreduce(x * (rank + 1.0), "sum"))
    return list(tape.gradient(loss, x).numpy())


def test_gradient_of_allreduce(ranks: Pool) -> None:
    for rank, found in enumerate(ranks.run(body_gradient)):
        assert found == [(rank + 1.0) * ranks.size] * 2


def body_refusals() -> dict[str, str]:
    from npu_bridge.hccl import hccl_ops as old
    from npu_device.distribute import hccl_ops

    size = npu.open().workers_num

    def refusal(operation: Any, *arguments: Any) -> str:
        try:
            operation(*arguments)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "accepted"

    one = tf.ones([size])
    return {
        "mean": refusal(hccl_ops.allreduce, one, "mean"),
        "reduce": refusal(hccl_ops.reduce, one, "median", 0),
        "fusion": refusal(hccl_ops.reduce, one, "sum", 0, 1),
        "fusion id": refusal(old.allgather, one, size, "hccl_world_group", 2, -1),
        "rank_size": refusal(hccl_ops.allgather, one, size + 1),
        "list": refusal(hccl_ops.broadcast, one, 0),
        "remote": refusal(hccl_ops.remote_read, one, tf.float32),
        "addresses": refusal(old.gather_all_to_all_v, one, one, one, one, tf.float32, 4),
        "own rank": refusal(hccl_ops.all_to_all_v_c, one, [[1] * size] * size, size),
        "root": refusal(hccl_ops.broadcast, [one], size),
        "dim0": refusal(hccl_ops.reduce_scatter, tf.ones([size + 1]), "sum", size),
        "scalar": refusal(hccl_ops.allgather, 1.0, size),
        "group": refusal(hccl_ops.allreduce, one, "sum", 1, -1, "nobody"),
        "bool": refusal(hccl_ops.reduce_scatter, tf.ones([size], tf.bool), "max", size),
        "send": refusal(hccl_ops.send, one, 0, 0) if size == 1 else "ValueError: single device",
        "negative": refusal(hccl_ops.all_to_all_v, one, [-1] * size, [0] * size, [1] * size, [0] * size),
        "how many": refusal(hccl_ops.all_to_all_v, one, [1] * (size + 1), [0] * size, [1] * size, [0] * size),
        "behind": refusal(hccl_ops.all_to_all_v, one, [1] * size, [size] * size, [1] * size, range(size)),
        "overlap": refusal(hccl_ops.all_to_all_v, one, [1] * size, range(size), [1] * size, [0] * size),
        "matrix": refusal(hccl_ops.all_to_all_v_c, one, [1] * size, npu.open().worker_id),
        "counts": refusal(
            hccl_ops.all_to_all_v, tf.ones([2 * size]), [1] * size, [0] * size, [2] * size, range(0, 2 * size, 2)
        ),
    }


def test_refusals(ranks: Pool) -> None:
    n = ranks.size
    for found in ranks.run(body_refusals):
        assert found["mean"].startswith("ValueError") and "npu.distribute.all_reduce knows 'mean'" in found["mean"]
        assert found["reduce"].startswith("ValueError") and "'sum', 'max', 'min', 'prod'" in found["reduce"]
        assert found["fusion"].startswith("ValueError") and "expected 0" in found["fusion"]
        assert found["fusion id"].startswith("ValueError: fusion_id -1")
        assert found["rank_size"].startswith("ValueError") and f"rank_size {n + 1}" in found["rank_size"]
        assert found["list"].startswith("TypeError") and "[tensor]" in found["list"]
        assert found["remote"].startswith("NotImplementedError") and "What to do" in found["remote"]
        assert found["addresses"].startswith("NotImplementedError") and "all_to_all_v" in found["addresses"]
        assert found["own rank"].startswith("ValueError") and "expected" in found["own rank"]
        assert found["send"].startswith("ValueError") and "single device" in found["send"]
        assert found["negative"].startswith("ValueError") and "send_counts must not be negative" in found["negative"]
        assert found["how many"].startswith("ValueError") and f"expected ({n},)" in found["how many"]
        assert found["behind"].startswith("ValueError") and f"there are {n}" in found["behind"]
        assert found["matrix"].startswith("ValueError") and "send_count_matrix" in found["matrix"]
        if n == 1:
            continue
        assert found["overlap"].startswith("ValueError") and "overlap at element 0" in found["overlap"]
        assert found["root"].startswith(f"ValueError: root_rank {n} ") and f"expected 0 to {n - 1}" in found["root"]
        assert found["dim0"].startswith("ValueError") and "must be a multiple of rank_size" in found["dim0"]
        assert found["scalar"].startswith("ValueError") and "tf.newaxis" in found["scalar"]
        assert found["group"].startswith("ValueError") and "nobody" in found["group"]
        assert found["bool"].startswith("TypeError") and "bool" in found["bool"]
        assert found["counts"].startswith("ValueError")
        assert "group rank 1 sends 1 to rank 0, which expects 2" in found["counts"]
