"""Data-parallel TensorFlow with the calls of Ascend's TF Adapter, on ordinary CPU and GPU TensorFlow.

The names are loaded from ``_api`` when first used, so that ``npu_device.launch`` starts without importing TensorFlow.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

from npu_device._src.membership.never_opened import warn_at_exit
from npu_device._src.membership.parent_rank import mark_as_candidate
from npu_device._src.neighbours import require_own_folders
from npu_device._src.version import __version__ as __version__

require_own_folders(os.path.dirname(os.path.dirname(__file__)))
mark_as_candidate()
warn_at_exit()

if TYPE_CHECKING:
    from npu_device._api import *  # noqa: F403

# ruff: noqa: F405
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
    "run",
    "set_device_sat_mode",
    "set_npu_loop_size",
    "set_schedule_aicore_task_early",
    "train",
    "utils",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'npu_device' has no attribute {name!r}")
    return getattr(importlib.import_module("npu_device._api"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
