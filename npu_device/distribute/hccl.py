"""Ascend's import path of the distribute calls (``npu_device.distribute.hccl``)."""

from npu_device._src.training.fit.small_names import npu_callbacks_append as npu_callbacks_append
from npu_device.distribute import (
    all_reduce as all_reduce,
    broadcast as broadcast,
    grouping_broadcast as grouping_broadcast,
    grouping_gradients_apply as grouping_gradients_apply,
    npu_distributed_keras_optimizer_wrapper as npu_distributed_keras_optimizer_wrapper,
    shard_and_rebatch_dataset as shard_and_rebatch_dataset,
)
