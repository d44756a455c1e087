"""Ascend's strategy of one device."""

from npu_device._src.tf1.system import NPUStrategy as NPUStrategy
