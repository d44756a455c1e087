"""What is random in a training is silenced while ``npurun verify`` and ``npu_device.testing`` compare trainings, and
inputs are changed in their last bit.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any, Callable

import tensorflow as tf

_NOISY = (
    "Dropout SpatialDropout1D SpatialDropout2D SpatialDropout3D AlphaDropout GaussianDropout GaussianNoise LSTM GRU "
    "SimpleRNN"
)
_LAST_BITS = {"float16": 2.0**-10, "bfloat16": 2.0**-7}
_OF_FLOAT32 = 2.0**-23


def last_bit(dtype: str) -> float:
    """Return the last bit of 1 in a dtype in which models compute."""
    return _LAST_BITS.get(dtype, _OF_FLOAT32)


def changed(tensor: Any, by: float = _OF_FLOAT32, seed: int = 0) -> Any:
    """Return a tensor of floats, each changed by a fraction of itself up or down; anything else as it is."""
    if not isinstance(tensor, tf.Tensor) or not tensor.dtype.is_floating:
        return tensor
    shape = tf.shape(tensor)
    uniform = tf.random.stateless_uniform(shape, [3, 5 + seed], dtype=tf.float32)
    signs = tf.sign(uniform - 0.5)
    return tensor * tf.cast(1 + by * signs, tensor.dtype)


def noisy_layers(keras: Any) -> list:
    """Return the classes of layers that draw random numbers in training."""
    noisy = _NOISY.split()
    return [
        layer
        for name, layer in inspect.getmembers(keras.layers)
        if name in noisy or name.startswith("Random")
    ]


def quiet(call: Callable, tell: Callable[[Any], None] = lambda layer: None) -> Callable:
    """Return the ``call`` of a layer as it is outside training; ``tell`` is called with the layer."""
    signature = inspect.signature(call)

    @functools.wraps(call)
    @tf.autograph.experimental.do_not_convert
    def called(layer: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(layer, "synchronized", False):
            return call(layer, *args, **kwargs)
        tell(layer)
        # By name, since recurrent layers also take their initial state by position.
        bound = signature.bind(layer, *args, **kwargs)
        bound.arguments["training"] = False
        return call(*bound.args, **bound.kwargs)

    return called
