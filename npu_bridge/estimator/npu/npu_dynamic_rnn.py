"""Recurrent operators with weights."""

from npu_device.ops.recurrent_layers import DynamicAUGRU, DynamicGRUV2, DynamicRNN

__all__ = ["DynamicAUGRU", "DynamicGRUV2", "DynamicRNN"]
