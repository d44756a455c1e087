"""Deformable convolution."""

from npu_device.ops.refused import deformable_conv2d

__all__ = ["deformable_conv2d"]
