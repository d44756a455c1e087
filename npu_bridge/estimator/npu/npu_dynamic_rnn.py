"""Recurrent operators with weights."""

from npu_device._src.operators.recurrent_layers import DynamicAUGRU, DynamicGRUV2, DynamicRNN

__all__ = ["DynamicAUGRU", "DynamicGRUV2", "DynamicRNN"]
