"""``npu.distribute``: what a training script adds to run on many workers."""

import importlib as _importlib
from typing import Any as _Any

from npu_device._src.training.distribute.dataset import (
    shard_and_rebatch_dataset as shard_and_rebatch_dataset,
)
from npu_device._src.training.distribute.load_once import load_once as load_once
from npu_device._src.training.distribute.ranks import (
    barrier as barrier,
    broadcast_object as broadcast_object,
    gather_object as gather_object,
    is_main as is_main,
    local_rank as local_rank,
    local_size as local_size,
    metric_results as metric_results,
    rank as rank,
    rank_zero_first as rank_zero_first,
    size as size,
    weighted_mean as weighted_mean,
)
from npu_device._src.training.distribute.reduce_values import (
    all_gather as all_gather,
    all_reduce as all_reduce,
)
from npu_device._src.training.distribute.variables import (
    broadcast as broadcast,
    grouping_broadcast as grouping_broadcast,
    grouping_gradients_apply as grouping_gradients_apply,
)
from npu_device._src.training.fit.divided import divided as divided, pipeline as pipeline
from npu_device._src.training.fit.replica import replicate as replicate
from npu_device._src.training.optimizers.optimizer_wrapper import (
    DistributedOptimizer as DistributedOptimizer,
    npu_distributed_keras_optimizer_wrapper as npu_distributed_keras_optimizer_wrapper,
)
from npu_device.distribute import hccl_ops as hccl_ops


def __getattr__(name: str) -> _Any:
    if name == "SyncBatchNormalization":
        place = "npu_device._src.training.distribute.sync_batch_normalization"
        return _importlib.import_module(place).SyncBatchNormalization
    if name not in ("hccl", "npu_callbacks"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _importlib.import_module(f"{__name__}.{name}")


def __dir__() -> list[str]:
    return sorted({*globals(), "SyncBatchNormalization", "hccl", "npu_callbacks"})
