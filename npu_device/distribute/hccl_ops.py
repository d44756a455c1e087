"""Ascend's import path of the collective operators, with the signatures of the TensorFlow 2 adapter."""

from npu_device._src.operators.refused import (
    gather_all_to_all_v as gather_all_to_all_v,
    remote_read as remote_read,
    remote_ref_read as remote_ref_read,
    remote_scatter_write as remote_scatter_write,
    remote_write as remote_write,
)
from npu_device._src.training.distribute.ascend_collectives import (
    all_to_all_v as all_to_all_v,
    all_to_all_v_c as all_to_all_v_c,
    allgather as allgather,
    allreduce as allreduce,
    alltoallv as alltoallv,
    alltoallvc as alltoallvc,
    broadcast as broadcast,
    receive as receive,
    reduce as reduce,
    reduce_scatter as reduce_scatter,
    send as send,
)
