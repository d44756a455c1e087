"""``from npu_bridge.estimator import npu_aicore_ops``; the name in it is Ascend's for all raw operators."""

from npu_device import gen_npu_ops as npu_aicore_ops
from npu_device._src.operators.activations import dropout_v3, fast_gelu, layer_norm, prelu

__all__ = ["dropout_v3", "fast_gelu", "layer_norm", "npu_aicore_ops", "prelu"]
