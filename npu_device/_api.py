"""The names of ``import npu_device as npu``, from the modules that implement them; ``__init__`` loads
this at their first use.
"""

from npu_device import callbacks, compat, configs, distribute, errors, gen_npu_ops, npu_device, ops, train, utils
from npu_device._src.no_effect.modes import (
    get_schedule_aicore_task_early,
    is_inf_nan_enabled,
    set_device_sat_mode,
    set_npu_loop_size,
    set_schedule_aicore_task_early,
)
from npu_device._src.options import global_options
from npu_device._src.training.compat_function import npu_compat_function
from npu_device._src.training.device import NpuDeviceHandle, close, open
from npu_device.configs import npu_run_context
from npu_device.utils.scope import keep_dtype_scope, npu_recompute_scope

__all__ = [
    "NpuDeviceHandle",
    "callbacks",
    "close",
    "compat",
    "configs",
    "distribute",
    "errors",
    "gen_npu_ops",
    "get_schedule_aicore_task_early",
    "global_options",
    "is_inf_nan_enabled",
    "keep_dtype_scope",
    "npu_compat_function",
    "npu_device",
    "npu_recompute_scope",
    "npu_run_context",
    "open",
    "ops",
    "set_device_sat_mode",
    "set_npu_loop_size",
    "set_schedule_aicore_task_early",
    "train",
    "utils",
]
