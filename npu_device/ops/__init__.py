"""``npu.ops``: Ascend's operators as TensorFlow operations, a file a family; ``gen_npu_ops`` has all names."""

from npu_device.ops.gelu import gelu

__all__ = ["gelu"]
