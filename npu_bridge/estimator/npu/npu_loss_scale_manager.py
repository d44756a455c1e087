"""Ascend's loss-scale managers."""

from npu_device.sessions.loss_scale import ExponentialUpdateLossScaleManager, FixedLossScaleManager

__all__ = ["ExponentialUpdateLossScaleManager", "FixedLossScaleManager"]
