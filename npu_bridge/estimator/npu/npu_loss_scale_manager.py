"""Ascend's loss-scale managers."""

from npu_device._src.tf1.distributed_optimizer import (
    ExponentialUpdateLossScaleManager as ExponentialUpdateLossScaleManager,
    FixedLossScaleManager as FixedLossScaleManager,
)
