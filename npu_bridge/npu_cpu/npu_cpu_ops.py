"""Operators of the processors of the NPU."""

from npu_device._src.operators.refused import embeddingrankid as embeddingrankid
