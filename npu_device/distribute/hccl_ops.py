"""Ascend's import path of the collective operators, with the signatures of the TensorFlow 2 adapter."""

from npu_device._src.operators.refused import (
    gather_all_to_all_v,
    remote_read,
    remote_ref_read,
    remote_scatter_write,
    remote_write,
)
from npu_device._src.training.hccl_ops import (
    all_to_all_v,
    all_to_all_v_c,
    allgather,
    allreduce,
    alltoallv,
    alltoallvc,
    broadcast,
    receive,
    reduce,
    reduce_scatter,
    send,
)

__all__ = [
    "all_to_all_v",
    "all_to_all_v_c",
    "allgather",
    "allreduce",
    "alltoallv",
    "alltoallvc",
    "broadcast",
    "gather_all_to_all_v",
    "receive",
    "reduce",
    "reduce_scatter",
    "remote_read",
    "remote_ref_read",
    "remote_scatter_write",
    "remote_write",
    "send",
]
