"""Ascend's distributed optimizers, and the reductions under them."""

from npu_device._src.tf1.distributed_optimizer import (
    KerasDistributeOptimizer as KerasDistributeOptimizer,
    NPUDistributedOptimizer as NPUDistributedOptimizer,
    NPUOptimizer as NPUOptimizer,
    allreduce as allreduce,
    npu_allreduce as npu_allreduce,
    npu_distributed_optimizer_wrapper as npu_distributed_optimizer_wrapper,
    reduce as reduce,
)
