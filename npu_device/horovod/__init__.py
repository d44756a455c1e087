"""Horovod's modules: ``import npu_device.horovod.tensorflow as hvd``; docs/from_horovod.md says what they offer."""

from npu_device._src.horovod.modules import __version__
from npu_device._src.horovod.other_names import __getattr__

__all__ = ["__getattr__", "__version__"]
