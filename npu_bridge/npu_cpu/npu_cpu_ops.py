"""Operators of the NPU's processors."""

from npu_device.ops.refused import embeddingrankid

__all__ = ["embeddingrankid"]
