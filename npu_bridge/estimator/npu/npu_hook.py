"""Ascend's session hooks."""

from npu_device._src.tf1.hooks import (
    NPUBroadcastGlobalVariablesHook as NPUBroadcastGlobalVariablesHook,
    NPUCheckpointSaverHook as NPUCheckpointSaverHook,
    NpuEmptyHook as NpuEmptyHook,
    NPUOutputTensorHook as NPUOutputTensorHook,
    SetIterationsVarHook as SetIterationsVarHook,
    TellMeStepOrLossHook as TellMeStepOrLossHook,
    broadcast_global_variables as broadcast_global_variables,
)
