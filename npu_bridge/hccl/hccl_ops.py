"""Ascend's import path of the collective operators in the TensorFlow 1 adapter."""

from npu_device.distribute.hccl_ops import *  # noqa: F403
