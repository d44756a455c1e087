"""The overflow flag of the NPU, which CPUs and GPUs lack: they give infinities and NaN instead, which can be detected.

Scripts read the flag once the gradients are there: ``with tf.control_dependencies(gradients): get_float_status(…)``. In
a graph, the result is therefore computed from the tensors that the operation waits for. There is nothing to clear.
"""

from __future__ import annotations

import logging
from typing import Any

import tensorflow as tf

_LOGGER = logging.getLogger("npu_device")
_LENGTH = 8


def npu_alloc_float_status(name: str | None = None) -> tf.Tensor:
    """Return the flag, clear: float32 ``[8]`` of zeros.

    Args:
        name: of the operation.

    Source: Ascend operator NPUAllocFloatStatus.
    """
    return tf.zeros([_LENGTH], name=name or "NpuAllocFloatStatus")


def npu_get_float_status(input: Any = None, name: str | None = None) -> tf.Tensor:
    """Return whether a tensor that the operation waits for holds an infinity or NaN.

    Args:
        input: from ``npu_alloc_float_status``; has no part in the answer.
        name: of the operation.

    Returns:
        float32 ``[8]``: 1 in front if there is one, zeros otherwise. Eagerly, and in a graph without control
        dependencies, this can't be determined: zeros, and a warning. All-reduce the result.

    Source: Ascend operator NPUGetFloatStatus.
    """
    with tf.name_scope(name or "NpuGetFloatStatus"):
        operations = [] if tf.executing_eagerly() else tf.no_op().control_inputs
        watched = [tensor for each in operations for tensor in each.outputs if tensor.dtype.is_floating]
        if not watched:
            _LOGGER.warning(
                "npu_get_float_status waits for no tensor, so it can't detect an overflow and reports none. "
                "What to do: call it in a graph, under tf.control_dependencies(gradients), or use tf.math.is_finite."
            )
            return tf.zeros([_LENGTH])
        finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(tensor)) for tensor in watched])
        return tf.pad([1.0 - tf.cast(finite, tf.float32)], [[0, _LENGTH - 1]])


def npu_clear_float_status(input: Any = None, name: str | None = None) -> tf.Tensor:
    """Return the flag, clear: float32 ``[8]`` of zeros.

    Args:
        input, name: as in ``npu_get_float_status``.

    Source: Ascend operator NPUClearFloatStatus.
    """
    return tf.zeros([_LENGTH], name=name or "NpuClearFloatStatus")


def npu_alloc_float_status_v2(name: str | None = None) -> tf.Tensor:
    """Return what ``npu_alloc_float_status`` returns, as int32.

    Args:
        name: of the operation.
    """
    return tf.zeros([_LENGTH], tf.int32, name=name or "NpuAllocFloatStatusV2")


def npu_get_float_status_v2(input: Any = None, name: str | None = None) -> tf.Tensor:
    """Return what ``npu_get_float_status`` returns, as int32.

    Args:
        input, name: as in ``npu_get_float_status``.
    """
    return tf.cast(npu_get_float_status(input, name), tf.int32)


def npu_clear_float_status_v2(input: Any = None, name: str | None = None) -> tf.Tensor:
    """Return what ``npu_clear_float_status`` returns, as int32.

    Args:
        input, name: as in ``npu_get_float_status``.
    """
    return tf.zeros([_LENGTH], tf.int32, name=name or "NpuClearFloatStatusV2")
