"""Deformable convolution."""

from npu_device._src.operators.refused import deformable_conv2d as deformable_conv2d
