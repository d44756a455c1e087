"""``npu.compat``: scripts in TensorFlow 1 style, with Ascend's import paths of the 2.x adapter."""

from npu_device._src.tf1.system import enable_v1 as enable_v1
from npu_device.compat import v1 as v1
