"""Ascend's settings of sessions and Estimators."""

from npu_device._src.tf1.config import decorator_tf_session as decorator_tf_session
from npu_device._src.tf1.run_config import (
    DumpConfig as DumpConfig,
    DynamicInputConfig as DynamicInputConfig,
    MemoryConfig as MemoryConfig,
    NpuExecutePlacement as NpuExecutePlacement,
    NPURunConfig as NPURunConfig,
    ProfilingConfig as ProfilingConfig,
)
