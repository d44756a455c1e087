"""``npu.ops.gelu``: the exact form eagerly, the fast one in graphs and in Keras's functional models."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from npu_device._src import compat
from npu_device._src.operators.activations import SLOPE, fast_gelu


def gelu(x: Any) -> Any:
    """Return gelu: by erf eagerly, ``x * sigmoid(1.702 * x)`` in graphs, as on Ascend; they differ by at most 0.021.

    Args:
        x: floating-point tensor of any shape, or a symbolic tensor of Keras.

    Returns:
        A tensor of the shape and dtype of ``x``; for a symbolic tensor, the result of Keras layers that compute the
        fast form, the last of them named ``npu.ops.gelu`` with a number. They are Keras's own: the model can be loaded
        without this package.

    Other ranks see nothing. Source: Ascend TF Adapter 2.x, ``npu.ops.gelu``.
    """
    if type(x).__name__ == "KerasTensor":
        return _layers(x)
    if tf.executing_eagerly():
        return tf.nn.gelu(x)
    return fast_gelu(x)


def _layers(x: Any) -> Any:
    keras = compat.keras_of(x)
    gate = keras.layers.Activation("sigmoid")(keras.layers.Rescaling(SLOPE)(x))
    number = keras.backend.get_uid("npu.ops.gelu")
    return keras.layers.Multiply(name=f"npu.ops.gelu_{number}")([x, gate])
