"""Ascend's import path of the distribute calls (``npu_device.distribute.hccl``)."""

from npu_device.callbacks import npu_callbacks_append
from npu_device.distribute import (
    all_reduce,
    broadcast,
    npu_distributed_keras_optimizer_wrapper,
    shard_and_rebatch_dataset,
)

__all__ = [
    "all_reduce",
    "broadcast",
    "npu_callbacks_append",
    "npu_distributed_keras_optimizer_wrapper",
    "shard_and_rebatch_dataset",
]
