"""Ascend's import path of the module of the adapter (``npu_device.npu_device``); the names live elsewhere."""

from npu_device import gen_npu_ops
from npu_device._src.membership.schemes import world_size_from_environment as get_ranksize
from npu_device._src.options import global_options
from npu_device._src.tf1.system import enable_v1
from npu_device._src.training.fit.small_names import stupid_repeat
from npu_device._src.training.opening.device import (
    NpuDeviceHandle,
    close,
    handle as global_npu_ctx,
    open,
)

__all__ = [
    "NpuDeviceHandle",
    "close",
    "enable_v1",
    "gen_npu_ops",
    "get_ranksize",
    "global_npu_ctx",
    "global_options",
    "open",
    "stupid_repeat",
]
