"""Ascend's strategy of one device."""

from npu_device._src.tf1.strategy import NPUStrategy

__all__ = ["NPUStrategy"]
