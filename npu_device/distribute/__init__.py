"""``npu.distribute``: what a training script adds to run on many workers."""

import importlib
from typing import Any

from npu_device._src.training.dataset import shard_and_rebatch_dataset
from npu_device._src.training.fit.divided import divided
from npu_device._src.training.fit.pipeline import pipeline
from npu_device._src.training.fit.replica import replicate
from npu_device._src.training.optimizer_wrapper import npu_distributed_keras_optimizer_wrapper
from npu_device._src.training.optimizer_wrapper import npu_distributed_keras_optimizer_wrapper as DistributedOptimizer
from npu_device._src.training.ranks import (
    barrier,
    broadcast_object,
    gather_object,
    is_main,
    local_rank,
    local_size,
    metric_results,
    rank,
    rank_zero_first,
    size,
    weighted_mean,
)
from npu_device._src.training.reduce_values import all_gather, all_reduce
from npu_device._src.training.sharded import grouping_broadcast, grouping_gradients_apply
from npu_device._src.training.variables import broadcast
from npu_device.distribute import hccl_ops

__all__ = [
    "DistributedOptimizer",
    "all_gather",
    "all_reduce",
    "barrier",
    "broadcast",
    "broadcast_object",
    "divided",
    "gather_object",
    "grouping_broadcast",
    "grouping_gradients_apply",
    "hccl_ops",
    "is_main",
    "local_rank",
    "local_size",
    "metric_results",
    "npu_distributed_keras_optimizer_wrapper",
    "pipeline",
    "rank",
    "rank_zero_first",
    "replicate",
    "shard_and_rebatch_dataset",
    "size",
    "weighted_mean",
]


def __getattr__(name: str) -> Any:
    if name not in ("hccl", "npu_callbacks"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f"{__name__}.{name}")
