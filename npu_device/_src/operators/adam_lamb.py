"""Steps of Adam and LAMB that Ascend has as single operators, with the names and the order of their inputs.

On Ascend they write their results into the inputs. Here an input that is a variable is assigned; a tensor stays as it
is, and the caller uses what is returned.
"""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

Triple = tuple[tf.Tensor, tf.Tensor, tf.Tensor]


def adam_apply_one_assign(
    input0: Any,
    input1: Any,
    input2: Any,
    input3: Any,
    input4: Any,
    mul0_x: Any,
    mul1_x: Any,
    mul2_x: Any,
    mul3_x: Any,
    add2_y: Any,
    name: str | None = None,
) -> Triple:
    """Return the new second moment, first moment and weights of a step of Adam without bias correction.

    Args:
        input0: the gradient, reduced.
        input1, input2, input3: second moment, first moment and weights; each is assigned if it is a variable.
        input4: learning rate.
        mul0_x, mul1_x: beta_1 and 1 - beta_1.
        mul2_x, mul3_x: beta_2 and 1 - beta_2.
        add2_y: epsilon, added to the root of the second moment.
        name: of the operation.

    Source: Ascend operator AdamApplyOneAssign.
    """
    inputs = (input0, input1, input2, input3, input4, mul0_x, mul1_x, mul2_x, mul3_x)
    name = name or "AdamApplyOneAssign"
    return adam_apply_one_with_decay_assign(*inputs, None, add2_y, name)


def adam_apply_one_with_decay_assign(
    input0: Any,
    input1: Any,
    input2: Any,
    input3: Any,
    input4: Any,
    mul0_x: Any,
    mul1_x: Any,
    mul2_x: Any,
    mul3_x: Any,
    mul4_x: Any,
    add2_y: Any,
    name: str | None = None,
) -> Triple:
    """Return what ``adam_apply_one_assign`` returns, with decoupled weight decay.

    Args:
        input0, input1, input2, input3, input4: as in ``adam_apply_one_assign``.
        mul0_x, mul1_x, mul2_x, mul3_x, add2_y, name: as in ``adam_apply_one_assign``.
        mul4_x: the rate of the weight decay; None for none.

    Source: Ascend operator AdamApplyOneWithDecayAssign.
    """
    with tf.name_scope(name or "AdamApplyOneWithDecayAssign"):
        mean, square = _moments(input0, input1, input2, mul0_x, mul1_x, mul2_x, mul3_x)
        weights = tf.convert_to_tensor(input3)
        update = mean / (tf.sqrt(square) + add2_y)
        if mul4_x is not None:
            update = update + mul4_x * weights
        weights = weights - input4 * update
        return _assigned((input1, square), (input2, mean), (input3, weights))


def lamb_apply_optimizer_assign(
    input0: Any,
    input1: Any,
    input2: Any,
    input3: Any,
    mul0_x: Any,
    mul1_x: Any,
    mul2_x: Any,
    mul3_x: Any,
    add2_y: Any,
    steps: Any,
    do_use_weight: Any,
    weight_decay_rate: Any,
    name: str | None = None,
) -> Triple:
    """Return the first half of a step of LAMB: the update before the norms of the layer scale it, and the new second
    and first moment.

    Args:
        input0: the gradient, reduced.
        input1, input2: second moment and first moment; each is assigned if it is a variable.
        input3: the weights; only read.
        mul0_x, mul1_x: beta_1 and 1 - beta_1.
        mul2_x, mul3_x: beta_2 and 1 - beta_2.
        add2_y: epsilon, added to the root of the second moment.
        steps: number of this step, from 1, for the bias correction.
        do_use_weight: 1 for weight decay, 0 for none.
        weight_decay_rate: the decay.
        name: of the operation.

    Source: Ascend operator LambApplyOptimizerAssign; You et al. 2019.
    """
    with tf.name_scope(name or "LambApplyOptimizerAssign"):
        mean, square = _moments(input0, input1, input2, mul0_x, mul1_x, mul2_x, mul3_x)
        steps = scalar(steps, mean.dtype)
        beta_1 = scalar(mul0_x, mean.dtype)
        beta_2 = scalar(mul2_x, mean.dtype)
        corrected_mean = mean / (1 - tf.pow(beta_1, steps))
        corrected_square = square / (1 - tf.pow(beta_2, steps))
        # The weight is a tensor, so that the graph may leave the decay out by 0.
        decay = scalar(do_use_weight, mean.dtype) * weight_decay_rate
        step = corrected_mean / (tf.sqrt(corrected_square) + add2_y)
        update = step + decay * tf.convert_to_tensor(input3)
        return _assigned((None, update), (input1, square), (input2, mean))


def lamb_apply_weight_assign(
    input0: Any, input1: Any, input2: Any, input3: Any, input4: Any, name: str | None = None
) -> tf.Tensor:
    """Return the weights less the update, scaled by the norms of both: the second half of a step of LAMB.

    Args:
        input0, input1: norms of the weights and of the update; their ratio counts as 1 where either is 0.
        input2: learning rate.
        input3: the update, from ``lamb_apply_optimizer_assign``.
        input4: the weights; assigned if they are a variable.
        name: of the operation.

    Source: Ascend operator LambApplyWeightAssign; You et al. 2019.
    """
    with tf.name_scope(name or "LambApplyWeightAssign"):
        update = tf.convert_to_tensor(input3)
        weights_norm = scalar(input0, update.dtype)
        update_norm = scalar(input1, update.dtype)
        # A layer of zeros has no ratio, and moves by the update as it is.
        has_ratio = tf.logical_and(weights_norm > 0, update_norm > 0)
        ratio = tf.math.divide_no_nan(weights_norm, update_norm)
        ratio = tf.where(has_ratio, ratio, tf.ones_like(weights_norm))
        weights = tf.convert_to_tensor(input4)
        weights = weights - ratio * input2 * update
        (weights,) = _assigned((input4, weights))
        return weights


def _moments(
    gradient: Any,
    square: Any,
    mean: Any,
    beta_1: Any,
    complement_1: Any,
    beta_2: Any,
    complement_2: Any,
) -> tuple[tf.Tensor, tf.Tensor]:
    gradient = tf.convert_to_tensor(gradient)
    mean = tf.convert_to_tensor(mean)
    square = tf.convert_to_tensor(square)
    new_mean = mean * beta_1 + gradient * complement_1
    new_square = square * beta_2 + tf.square(gradient) * complement_2
    return new_mean, new_square


def _assigned(*pairs: tuple[Any, tf.Tensor]) -> tuple[tf.Tensor, ...]:
    """Return the new values; in a graph they are available only once the variables have them."""
    # The first releases of Keras 3 give None.
    writes = [target.assign(tensor) for target, tensor in pairs if hasattr(target, "assign")]
    with tf.control_dependencies([write for write in writes if write is not None]):
        return tuple(tf.identity(tensor) for _, tensor in pairs)


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
        weight = tf.convert_to_tensor(input_weight)
        gradient = tf.convert_to_tensor(input_grad)
        decay = scalar(weight_decay, weight.dtype)
        norm = tf.norm(weight)
        rate = hyperpara * norm / (tf.norm(gradient) + decay * norm + epsilon)
        # The bound is in units of the learning rate, which the optimizer multiplies by.
        if use_clip:
            rate = tf.minimum(rate / scalar(learning_rate, weight.dtype), 1)
        return rate * (gradient + decay * weight)


def lars(
    inputs_w: Sequence,
    inputs_g: Sequence,
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
    scaled = []
    for weight, gradient in zip(inputs_w, inputs_g):
        scaled.append(lars_v2(weight, gradient, weight_decay, 1.0, hyperpara, epsilon, name=name))
    return scaled


def scalar(number: Any, dtype: Any) -> tf.Tensor:
    """Return a tensor of the dtype. tf.cast alone would convert Python numbers to float32 first and lose digits."""
    if isinstance(number, numbers.Number):
        return tf.constant(number, dtype)
    return tf.cast(number, dtype)
