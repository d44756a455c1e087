"""Ascend's import path of the broadcasting callback (``npu_device.distribute.npu_callbacks``)."""

from npu_device._src.training.broadcast_callback import (
    NPUBroadcastGlobalVariablesCallback,
    broadcast_helper,
    broadcast_keras_model,
)
from npu_device._src.training.variables import npu_broadcast_scope_wrapper

__all__ = [
    "NPUBroadcastGlobalVariablesCallback",
    "broadcast_helper",
    "broadcast_keras_model",
    "npu_broadcast_scope_wrapper",
]
