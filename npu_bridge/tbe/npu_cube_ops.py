"""Deformable convolution."""

from npu_device._src.operators.refused import deformable_conv2d

__all__ = ["deformable_conv2d"]
