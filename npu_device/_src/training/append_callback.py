"""``npu_callbacks_append``: a list of callbacks with the broadcasting one at its end."""

from __future__ import annotations

from typing import Any


def npu_callbacks_append(callbacks_list: Any = ()) -> list[Any]:
    """Add ``NPUBroadcastGlobalVariablesCallback(0)`` to a list of Keras callbacks.

    Args:
        callbacks_list: the list to append to, in place; anything that isn't a list gives a new one, as on Ascend.

    Returns:
        The list.

    Source: Ascend TF Adapter 2.x, ``npu_device.distribute.hccl.npu_callbacks_append``.
    """
    from npu_device._src.training.broadcast_callback import NPUBroadcastGlobalVariablesCallback

    if not isinstance(callbacks_list, list):
        callbacks_list = []
    callbacks_list.append(NPUBroadcastGlobalVariablesCallback(0))
    return callbacks_list
