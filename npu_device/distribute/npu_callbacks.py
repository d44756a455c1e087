"""Ascend's import path of the broadcasting callback (``npu_device.distribute.npu_callbacks``)."""

from npu_device.callbacks.broadcast import NPUBroadcastGlobalVariablesCallback, broadcast_helper, broadcast_keras_model

__all__ = ["NPUBroadcastGlobalVariablesCallback", "broadcast_helper", "broadcast_keras_model"]
