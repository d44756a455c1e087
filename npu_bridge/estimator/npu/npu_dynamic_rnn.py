"""Recurrent operators with weights."""

from npu_device._src.operators.recurrent import (
    DynamicAUGRU as DynamicAUGRU,
    DynamicGRUV2 as DynamicGRUV2,
    DynamicRNN as DynamicRNN,
)
