"""Ascend's ``npu_compat_function``, ``npu_callbacks_append`` and ``stupid_repeat``, without importing TensorFlow."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

_log = logging.getLogger("npu_device")

_XLA_FLAGS = ("jit_compile", "experimental_compile")

_warned = False


def npu_compat_function(func: Callable | None = None, **kwargs: Any) -> Any:
    """Compile a function as ``tf.function`` does, without the flags that ask for XLA.

    Args:
        func: the function to compile; None when the decorator is written with arguments.
        **kwargs: arguments of ``tf.function``. ``jit_compile`` and ``experimental_compile`` are dropped; the first time
            that one of them asks for XLA a warning is logged.

    Returns:
        The compiled function, or a decorator when ``func`` is None.

    Raises:
        TypeError: an argument that ``tf.function`` does not know.

    Source: Ascend TF Adapter 2.x, ``npu.npu_compat_function``.
    """
    global _warned
    import tensorflow as tf

    asked = [flag for flag in _XLA_FLAGS if kwargs.pop(flag, None)]
    if asked and not _warned:
        _warned = True
        _log.warning(
            "npu_compat_function ignores %s; use tf.function to compile with XLA",
            " and ".join(asked),
        )
    return tf.function(func, **kwargs)


def npu_callbacks_append(callbacks_list: Any = ()) -> list:
    """Add ``NPUBroadcastGlobalVariablesCallback(0)`` to a list of Keras callbacks.

    Args:
        callbacks_list: the list to append to, in place; anything that isn't a list gives a new one, as on Ascend.

    Returns:
        The list.

    Source: Ascend TF Adapter 2.x, ``npu_device.distribute.hccl.npu_callbacks_append``.
    """
    from npu_device._src.training.fit.broadcast_callback import NPUBroadcastGlobalVariablesCallback

    if not isinstance(callbacks_list, list):
        callbacks_list = []
    callbacks_list.append(NPUBroadcastGlobalVariablesCallback(0))
    return callbacks_list


def stupid_repeat(word: str, times: int) -> None:
    """Log a word a number of times, at level INFO.

    Args:
        word: the text.
        times: how often.

    Source: Ascend TF Adapter 2.x, ``npu_device.npu_device.stupid_repeat``.
    """
    for _ in range(times):
        _log.info("%s", word)
