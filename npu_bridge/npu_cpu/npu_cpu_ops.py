"""Operators of the NPU's processors."""

from npu_device._src.operators.refused import embeddingrankid

__all__ = ["embeddingrankid"]
