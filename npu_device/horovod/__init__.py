"""Horovod's modules: ``import npu_device.horovod.tensorflow as hvd``; docs/from_horovod.md says what they offer."""

from npu_device._src.horovod.modules import __version__ as __version__
from npu_device._src.horovod.other_names import __getattr__ as __getattr__
