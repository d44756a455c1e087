"""``from npu_bridge.estimator.npu_unary_ops import npu_unary_ops``: the name is Ascend's for all raw operators."""

from npu_device import gen_npu_ops as npu_unary_ops
from npu_device._src.operators.activations import tanh_gelu as gelu

__all__ = ["gelu", "npu_unary_ops"]
