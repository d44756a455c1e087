"""``from npu_bridge.estimator import npu_aicore_ops``; the name in it is Ascend's for all raw operators."""

from npu_device import gen_npu_ops as npu_aicore_ops
from npu_device._src.operators.activations import (
    centralization,
    dropout_v3,
    fast_gelu,
    fast_gelu_v2,
    layer_norm,
    prelu,
)

__all__ = [
    "centralization",
    "dropout_v3",
    "fast_gelu",
    "fast_gelu_v2",
    "layer_norm",
    "npu_aicore_ops",
    "prelu",
]
