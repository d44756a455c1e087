"""``npu.distribute``: what a training script adds to run on many workers."""

from npu_device.distribute import hccl_ops
from npu_device.distribute.dataset import shard_and_rebatch_dataset
from npu_device.distribute.optimizer import npu_distributed_keras_optimizer_wrapper
from npu_device.distribute.reduce import all_reduce
from npu_device.distribute.sharded import grouping_broadcast, grouping_gradients_apply
from npu_device.distribute.variables import broadcast

__all__ = [
    "all_reduce",
    "broadcast",
    "grouping_broadcast",
    "grouping_gradients_apply",
    "hccl_ops",
    "npu_distributed_keras_optimizer_wrapper",
    "shard_and_rebatch_dataset",
]
