"""Ascend's activations, layer norm and dropout as TensorFlow operations, which TensorFlow differentiates; and the
overflow flag of the NPU, which CPUs and GPUs lack: they give infinities and NaN instead, which can be detected.

Scripts read the flag once the gradients are there: ``with tf.control_dependencies(gradients): get_float_status(…)``. In
a graph, the flag is therefore computed from the tensors that the operation waits for. There is nothing to clear.
"""

from __future__ import annotations

import logging
import numbers
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from npu_device._src import compat

_LOGGER = logging.getLogger("npu_device")
_LENGTH = 8  # numbers in the flag, as on the NPU; the first one counts

# The sigmoid in place of the normal distribution's integral: Hendrycks and Gimpel 2016, section 2.
_SLOPE = 1.702

# The parabola in place of erf, and its top: Kim et al. 2021 (I-BERT), equation 8.
_PARABOLA_FACTOR = -0.2888
_PARABOLA_TOP = 1.769


def fast_gelu(x: Any, name: str | None = None) -> tf.Tensor:
    """Return ``x * sigmoid(1.702 * x)``.

    Args:
        x: floating-point tensor of any shape.
        name: of the operation.

    >>> float(fast_gelu([0.0])[0])
    0.0

    Source: Ascend operator FastGelu.
    """
    with tf.name_scope(name or "FastGelu"):
        x = tf.convert_to_tensor(x)
        return x * tf.sigmoid(_SLOPE * x)


def fast_gelu_v2(x: Any, name: str | None = None) -> tf.Tensor:
    """Return gelu with a parabola in place of erf, which differs from gelu by at most 0.02.

    Args:
        x, name: as in ``fast_gelu``.

    ``x/2 * (1 + sign(x) * (a * (min(|x|/sqrt(2), b) - b)**2 + 1))`` with a = -0.2888 and b = 1.769. Source: Ascend
    operator FastGeluV2; Kim et al. 2021, I-BERT.
    """
    with tf.name_scope(name or "FastGeluV2"):
        x = tf.convert_to_tensor(x)
        clipped = tf.minimum(tf.abs(x) * 0.5**0.5, _PARABOLA_TOP)
        parabola = _PARABOLA_FACTOR * tf.square(clipped - _PARABOLA_TOP) + 1
        erf = tf.sign(x) * parabola
        return 0.5 * x * (1 + erf)


def tanh_gelu(x: Any, name: str | None = None) -> tf.Tensor:
    """Return gelu in its tanh form, ``x/2 * (1 + tanh(sqrt(2/pi) * (x + 0.044715 * x**3)))``.

    Args:
        x, name: as in ``fast_gelu``.

    Source: Ascend TF Adapter 1.15, ``npu_unary_ops.gelu``.
    """
    return tf.nn.gelu(x, approximate=True, name=name)


def prelu(x: Any, weight: Any, name: str | None = None) -> tf.Tensor:
    """Return ``x`` where it is positive and ``weight * x`` elsewhere.

    Args:
        x: floating-point tensor, channels last.
        weight: one number, or one for each channel; dtype of ``x``.
        name: of the operation.

    >>> prelu([-2.0, 2.0], 0.5).numpy().tolist()
    [-1.0, 2.0]

    Source: Ascend TF Adapter 1.15, ``npu_aicore_ops.prelu``.
    """
    with tf.name_scope(name or "PRelu"):
        x = tf.convert_to_tensor(x)
        # Two terms instead of a condition, so that the gradient of the weight comes by itself.
        return tf.nn.relu(x) - weight * tf.nn.relu(-x)


p_relu = prelu


def centralization(x: Any, axes: Sequence[int] | int = (-1,), name: str | None = None) -> tf.Tensor:
    """Return ``x`` less its mean over ``axes``.

    Args:
        x: floating-point tensor of any shape.
        axes: axes of the mean; default the last axis.
        name: of the operation.

    >>> centralization([1.0, 3.0]).numpy().tolist()
    [-1.0, 1.0]

    Source: Ascend TF Adapter 1.15, ``npu_aicore_ops.centralization``.
    """
    with tf.name_scope(name or "Centralization"):
        x = tf.convert_to_tensor(x)
        return x - tf.reduce_mean(x, axis=axes, keepdims=True)


def gelu(x: Any) -> Any:
    """Return gelu: by erf eagerly, ``x * sigmoid(1.702 * x)`` in graphs, as on Ascend; they differ by at most 0.021.

    Args:
        x: floating-point tensor of any shape. A symbolic tensor of Keras gives layers of Keras that compute the fast
            form, the last named ``npu.ops.gelu`` with a number: the model can be loaded without this package.

    Source: Ascend TF Adapter 2.x, ``npu.ops.gelu``.
    """
    if type(x).__name__ == "KerasTensor":
        keras = compat.keras_of(x)
        # An operation of TensorFlow can't take a symbolic tensor of Keras, but layers can.
        scaled = keras.layers.Rescaling(_SLOPE)(x)
        gate = keras.layers.Activation("sigmoid")(scaled)
        unique_id = keras.backend.get_uid("npu.ops.gelu")
        multiply = keras.layers.Multiply(name=f"npu.ops.gelu_{unique_id}")
        return multiply([x, gate])
    if tf.executing_eagerly():
        return tf.nn.gelu(x)
    return fast_gelu(x)


def layer_norm(
    x: Any,
    gamma: Any,
    beta: Any,
    begin_norm_axis: int = 0,
    begin_params_axis: int = 0,
    epsilon: float = 1e-7,
    name: str | None = None,
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Return ``gamma * (x - mean) / sqrt(variance + epsilon) + beta``, mean and variance.

    Args:
        x: floating-point tensor of known rank.
        gamma, beta: scale and offset, of the shape ``x.shape[begin_params_axis:]`` and the dtype of ``x``.
        begin_norm_axis: mean and variance are taken over this axis and those behind it; default all of them.
        begin_params_axis: first axis of ``gamma`` and ``beta``; default 0.
        epsilon: added to the variance; default 1e-7.
        name: of the operation.

    Returns:
        The normalised tensor; the mean and the variance, with 1 in the place of the axes averaged over. All have the
        dtype of ``x``; 16-bit tensors are averaged in float32.

    Source: Ascend operator LayerNorm.
    """
    with tf.name_scope(name or "LayerNorm"):
        x = tf.convert_to_tensor(x)
        # The mean of many numbers would be lost in 16 bits.
        wide = x
        if x.dtype.size < 4:
            wide = tf.cast(x, tf.float32)
        rank = x.shape.rank
        axes = list(range(begin_norm_axis % rank, rank))
        trailing = tf.shape(x)[begin_params_axis:]
        mean = tf.reduce_mean(wide, axes, keepdims=True)
        # Not tf.nn.moments: TensorFlow 2.20's graph optimizer would replace everything by a fused layer norm with
        # another epsilon, and drop the mean although it is fetched (tensorflow/tensorflow#62607). Can go when that
        # rewrite respects both.
        variance = tf.reduce_mean(tf.square(wide - mean), axes, keepdims=True)
        normalised = (wide - mean) * tf.math.rsqrt(variance + epsilon)
        scale = tf.reshape(tf.cast(gamma, wide.dtype), trailing)
        offset = tf.reshape(tf.cast(beta, wide.dtype), trailing)
        y = normalised * scale + offset
        y, mean, variance = (tf.cast(tensor, x.dtype) for tensor in (y, mean, variance))
        return y, mean, variance


fused_layer_norm = layer_norm


def dropout(
    x: Any,
    keep_prob: Any,
    noise_shape: Any = None,
    seed: int | None = None,
    name: str | None = None,
) -> tf.Tensor:
    """Return what ``dropout_v3`` returns, in graphs only.

    Args:
        x, keep_prob, noise_shape, seed, name: as in ``dropout_v3``.

    Raises:
        RuntimeError: called eagerly.
        ValueError: as in ``dropout_v3``.

    Source: Ascend TF Adapter 1.15, ``npu_ops.dropout``.
    """
    if tf.executing_eagerly():
        raise RuntimeError(
            "npu_ops.dropout was called eagerly; on Ascend it works in graphs only.\n"
            "What to do: call it in a tf.function or a TensorFlow 1 graph, or use tf.nn.dropout(x, rate=1 - keep_prob)."
        )
    return dropout_v3(x, keep_prob, noise_shape, seed, name)


def dropout_v3(
    x: Any,
    keep_prob: Any,
    noise_shape: Any = None,
    seed: int | None = None,
    name: str | None = None,
) -> tf.Tensor:
    """Return ``tf.nn.dropout`` by the probability to keep: kept elements are divided by it, others are 0.

    Args:
        x: floating-point tensor of any shape.
        keep_prob: a number in (0, 1], or a scalar tensor. With the Python float 1.0 the result is ``x``.
        noise_shape: shape of the mask, which is broadcast to ``x``; default the shape of ``x``. None in it stands for
            the length of ``x``.
        seed: Python int; default none. Ranks drop other elements unless it is the same.
        name: of the operation.

    Raises:
        ValueError: ``x`` isn't floating point, or ``keep_prob`` is a number outside (0, 1].

    >>> dropout_v3([1.0, 2.0], keep_prob=1.0).numpy().tolist()
    [1.0, 2.0]

    Source: Ascend TF Adapter 1.15, ``npu_aicore_ops.dropout_v3``.
    """
    with tf.name_scope(name or "dropout"):
        x = tf.convert_to_tensor(x)
        if not x.dtype.is_floating:
            raise ValueError(
                f"dropout was given a tensor of {x.dtype.name}, expected a floating-point one, because what is kept is "
                "scaled.\nWhat to do: tf.cast it first."
            )
        is_number = isinstance(keep_prob, numbers.Real)
        if is_number and not 0 < float(keep_prob) <= 1:
            raise ValueError(
                f"dropout was given keep_prob {keep_prob}, expected a number above 0 and not above 1.\n"
                "Likely cause: the rate was passed; keep_prob is 1 - rate."
            )
        if isinstance(noise_shape, (list, tuple)):
            noise_shape = list(noise_shape)
            # tf.nn.dropout takes no None in a graph.
            for axis, length in enumerate(noise_shape):
                if length is None:
                    noise_shape[axis] = tf.shape(x)[axis]
        if not is_number:
            keep_prob = tf.cast(keep_prob, x.dtype)
        return tf.nn.dropout(x, 1 - keep_prob, noise_shape, seed)


def npu_alloc_float_status(name: str | None = None) -> tf.Tensor:
    """Return the flag, clear: float32 ``[8]`` of zeros.

    Args:
        name: of the operation.

    Source: Ascend operator NPUAllocFloatStatus.
    """
    # An identity can be given another input by ``npu_get_float_status``.
    return tf.identity(tf.zeros([_LENGTH]), name or "NpuAllocFloatStatus")


def npu_get_float_status(input: Any = None, name: str | None = None) -> tf.Tensor:
    """Return whether a tensor that the operation waits for holds an infinity or NaN.

    Args:
        input: from ``npu_alloc_float_status``, of the same graph. What is computed from it from now on sees the result.
        name: of the operation.

    Returns:
        float32 ``[8]``: 1 in front if there is one, zeros otherwise. Eagerly, and in a graph without control
        dependencies, this can't be determined: zeros, and a warning. All-reduce the result.

    Source: Ascend operator NPUGetFloatStatus.
    """
    with tf.name_scope(name or "NpuGetFloatStatus"):
        watched = []
        if not tf.executing_eagerly():
            # A new operation waits for the operations that the caller has named, and lists them as its control inputs.
            for operation in tf.no_op().control_inputs:
                watched += [tensor for tensor in operation.outputs if tensor.dtype.is_floating]
        if not watched:
            _LOGGER.warning(
                "npu_get_float_status waits for no tensor, so it can't detect an overflow and reports none. "
                "What to do: call it in a graph, under tf.control_dependencies(gradients), or use tf.math.is_finite."
            )
            return tf.zeros([_LENGTH])
        are_finite = [tf.reduce_all(tf.math.is_finite(tensor)) for tensor in watched]
        finite = tf.cast(tf.reduce_all(are_finite), tf.float32)
        flag = tf.pad([1.0 - finite], [[0, _LENGTH - 1]])
        if input is not None:
            _write(flag, input)
        return flag


def _write(flag: tf.Tensor, status: Any) -> None:
    status_graph = getattr(status, "graph", None)
    if status_graph is not flag.graph or status.op.type != "Identity":
        _LOGGER.warning(
            "npu_get_float_status can't write to its input, which isn't from npu_alloc_float_status in the same graph. "
            "What to do: use its result."
        )
        return
    compat.feed_later_users(status.op, tf.cast(flag, status.dtype))


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
    return tf.identity(tf.zeros([_LENGTH], tf.int32), name or "NpuAllocFloatStatusV2")


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
