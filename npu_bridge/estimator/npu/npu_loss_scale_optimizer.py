"""Ascend's loss-scale optimizer. Scripts take the managers from here too."""

from npu_device._src.tf1.loss_scale import (
    ExponentialUpdateLossScaleManager as ExponentialUpdateLossScaleManager,
    FixedLossScaleManager as FixedLossScaleManager,
    NPULossScaleOptimizer as NPULossScaleOptimizer,
)
