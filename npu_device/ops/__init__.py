"""``npu.ops``: Ascend's operators as TensorFlow operations, a file a family; ``gen_npu_ops`` has all names."""

from npu_device._src.operators.activations import gelu

__all__ = ["gelu"]
