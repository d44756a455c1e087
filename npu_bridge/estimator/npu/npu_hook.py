"""Ascend's session hooks."""

from npu_device._src.tf1.hooks import (
    NPUBroadcastGlobalVariablesHook,
    NPUCheckpointSaverHook,
    NpuEmptyHook,
    NPUOutputTensorHook,
    SetIterationsVarHook,
    TellMeStepOrLossHook,
    broadcast_global_variables,
)

__all__ = [
    "NPUBroadcastGlobalVariablesHook",
    "NPUCheckpointSaverHook",
    "NPUOutputTensorHook",
    "NpuEmptyHook",
    "SetIterationsVarHook",
    "TellMeStepOrLossHook",
    "broadcast_global_variables",
]
