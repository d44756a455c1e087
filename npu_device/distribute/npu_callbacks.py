"""Ascend's import path of the broadcasting callback (``npu_device.distribute.npu_callbacks``)."""

from npu_device._src.training.distribute.variables import (
    npu_broadcast_scope_wrapper as npu_broadcast_scope_wrapper,
)
from npu_device._src.training.fit.broadcast_callback import (
    NPUBroadcastGlobalVariablesCallback as NPUBroadcastGlobalVariablesCallback,
    broadcast_helper as broadcast_helper,
    broadcast_keras_model as broadcast_keras_model,
)
