"""Ascend's import path of the collective operators in the TensorFlow 1 adapter."""

from npu_device.distribute.hccl_ops import (
    all_to_all_v,
    all_to_all_v_c,
    allgather,
    allreduce,
    alltoallv,
    alltoallvc,
    broadcast,
    gather_all_to_all_v,
    receive,
    reduce,
    reduce_scatter,
    remote_read,
    remote_ref_read,
    remote_scatter_write,
    remote_write,
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
