"""Ascend's Keras callback for the TensorFlow 1 adapter."""

from npu_device.distribute.npu_callbacks import (
    NPUBroadcastGlobalVariablesCallback as NPUBroadcastGlobalVariablesCallback,
)
