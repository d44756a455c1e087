"""Ascend's distributed optimizers, and the reductions under them."""

from npu_device._src.tf1.distributed_optimizer import (
    KerasDistributeOptimizer,
    NPUDistributedOptimizer,
    allreduce,
    npu_allreduce,
    npu_distributed_optimizer_wrapper,
    reduce,
)
from npu_device._src.tf1.loss_scale import NPUOptimizer

__all__ = [
    "KerasDistributeOptimizer",
    "NPUDistributedOptimizer",
    "NPUOptimizer",
    "allreduce",
    "npu_allreduce",
    "npu_distributed_optimizer_wrapper",
    "reduce",
]
