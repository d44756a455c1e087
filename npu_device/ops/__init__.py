"""``npu.ops``: ``gelu``, as in Ascend's TF Adapter. ``npu_device.gen_npu_ops`` has all other operators."""

from npu_device._src.operators.activations import gelu as gelu
