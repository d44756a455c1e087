"""Ascend's distributed optimizers, and the reductions under them."""

from npu_device.sessions.loss_scale import NPUOptimizer
from npu_device.sessions.optimizer import (
    KerasDistributeOptimizer,
    NPUDistributedOptimizer,
    allreduce,
    npu_allreduce,
    npu_distributed_optimizer_wrapper,
    reduce,
)

__all__ = [
    "KerasDistributeOptimizer",
    "NPUDistributedOptimizer",
    "NPUOptimizer",
    "allreduce",
    "npu_allreduce",
    "npu_distributed_optimizer_wrapper",
    "reduce",
]
