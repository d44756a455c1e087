"""Ascend's import path of the broadcasting callback (``npu_device.distribute.npu_callbacks``)."""

from npu_device.callbacks.broadcast import NPUBroadcastGlobalVariablesCallback, broadcast_helper, broadcast_keras_model
from npu_device.callbacks.strategy_scope import npu_broadcast_scope_wrapper

__all__ = [
    "NPUBroadcastGlobalVariablesCallback",
    "broadcast_helper",
    "broadcast_keras_model",
    "npu_broadcast_scope_wrapper",
]
