"""Ascend's strategy of one device."""

from npu_device.sessions.strategy import NPUStrategy

__all__ = ["NPUStrategy"]
