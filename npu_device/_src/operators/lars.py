"""Layer-wise scaled gradients (LARS) as Ascend's operators give them; the optimizer is left to the script."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from npu_device._src.operators.scalars import scalar


def lars_v2(
    input_weight: Any,
    input_grad: Any,
    weight_decay: Any,
    learning_rate: Any,
    hyperpara: float = 0.001,
    epsilon: float = 0.00001,
    use_clip: bool = False,
    name: str | None = None,
) -> tf.Tensor:
    """Return the gradient of a layer with weight decay, times a rate computed from the norms of the layer.

    ``rate = hyperpara * |w| / (|g| + weight_decay * |w| + epsilon)``, with ``use_clip`` at most the learning rate and
    in units of it: ``min(rate / learning_rate, 1)``. The result is ``rate * (g + weight_decay * w)``.

    Args:
        input_weight: weights of the layer, ``w``, floating point.
        input_grad: their gradient ``g``, reduced; shape and dtype of ``w``.
        weight_decay, learning_rate: numbers of the dtype of ``w``; the rate counts with ``use_clip`` only.
        hyperpara: trust in the layer; default 0.001.
        epsilon: keeps the denominator from zero; default 1e-5.
        use_clip: default False.
        name: of the operation.

    Source: Ascend operator LarsV2; You et al. 2017.
    """
    with tf.name_scope(name or "LarsV2"):
        weight, gradient = tf.convert_to_tensor(input_weight), tf.convert_to_tensor(input_grad)
        decay = scalar(weight_decay, weight.dtype)
        norm = tf.norm(weight)
        rate = hyperpara * norm / (tf.norm(gradient) + decay * norm + epsilon)
        if use_clip:
            rate = tf.minimum(rate / scalar(learning_rate, weight.dtype), 1)
        return rate * (gradient + decay * weight)


def lars(
    inputs_w: Sequence[Any],
    inputs_g: Sequence[Any],
    weight_decay: Any,
    hyperpara: float = 0.001,
    epsilon: float = 0.00001,
    name: str | None = None,
) -> list[tf.Tensor]:
    """Return ``lars_v2`` without clipping for each weight and gradient of two lists, in the order of the weights.

    Args:
        inputs_w, inputs_g: the layers' weights, and their gradients in the same order.
        weight_decay, hyperpara, epsilon, name: as in ``lars_v2``.

    Raises:
        ValueError: the lists differ in length.

    Source: Ascend TF Adapter 1.15, ``npu_ops.LARS``.
    """
    if len(inputs_w) != len(inputs_g):
        raise ValueError(
            f"LARS was given {len(inputs_w)} weights and {len(inputs_g)} gradients, expected as many of each.\n"
            "What to do: leave out the variables whose gradient is None."
        )
    return [
        lars_v2(weight, gradient, weight_decay, 1.0, hyperpara, epsilon, name=name)
        for weight, gradient in zip(inputs_w, inputs_g)
    ]
