"""Ascend's settings of sessions and Estimators."""

from npu_device._src.tf1.config import decorator_tf_session
from npu_device._src.tf1.run_config import (
    DumpConfig,
    DynamicInputConfig,
    MemoryConfig,
    NpuExecutePlacement,
    NPURunConfig,
    ProfilingConfig,
)

__all__ = [
    "DumpConfig",
    "DynamicInputConfig",
    "MemoryConfig",
    "NPURunConfig",
    "NpuExecutePlacement",
    "ProfilingConfig",
    "decorator_tf_session",
]
