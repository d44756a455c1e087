"""Ascend's loss-scale managers."""

from npu_device._src.tf1.loss_scale import (
    ExponentialUpdateLossScaleManager as ExponentialUpdateLossScaleManager,
    FixedLossScaleManager as FixedLossScaleManager,
)
