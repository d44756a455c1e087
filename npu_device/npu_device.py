"""Ascend's import path of the adapter's module (``npu_device.npu_device``); the names live elsewhere."""

from npu_device.cluster.membership import world_size_from_environment as get_ranksize
from npu_device.device import NpuDeviceHandle, close, open
from npu_device.device import handle as global_npu_ctx
from npu_device.options import global_options
from npu_device.utils.repeat import stupid_repeat

__all__ = ["NpuDeviceHandle", "close", "get_ranksize", "global_npu_ctx", "global_options", "open", "stupid_repeat"]
