"""Ascend's session hooks."""

from npu_device._src.tf1.hooks import (
    NPUBroadcastGlobalVariablesHook as NPUBroadcastGlobalVariablesHook,
    NPUCheckpointSaverHook as NPUCheckpointSaverHook,
    NpuEmptyHook as NpuEmptyHook,
    SetIterationsVarHook as SetIterationsVarHook,
    broadcast_global_variables as broadcast_global_variables,
)
