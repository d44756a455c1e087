"""Ascend's session hooks."""

from npu_device._src.tf1.hooks import (
    NPUBroadcastGlobalVariablesHook,
    NPUCheckpointSaverHook,
    NpuEmptyHook,
    SetIterationsVarHook,
    broadcast_global_variables,
)

__all__ = [
    "NPUBroadcastGlobalVariablesHook",
    "NPUCheckpointSaverHook",
    "NpuEmptyHook",
    "SetIterationsVarHook",
    "broadcast_global_variables",
]
