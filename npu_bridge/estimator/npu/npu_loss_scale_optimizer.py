"""Ascend's loss-scale optimizer. Scripts take the managers from here too."""

from npu_device._src.tf1.distributed_optimizer import (
    ExponentialUpdateLossScaleManager as ExponentialUpdateLossScaleManager,
    FixedLossScaleManager as FixedLossScaleManager,
    NPULossScaleOptimizer as NPULossScaleOptimizer,
)
