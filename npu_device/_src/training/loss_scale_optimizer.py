"""``npu.train.optimizer``: a loss-scale optimizer for whichever Keras the optimizer inside belongs to.

Its behaviour in each Keras is defined in ``keras_families``. Importing this file imports no Keras.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from npu_device._src.training.keras_families import KerasFamily, class_for


class NpuLossScaleOptimizer:
    """Scales the loss so that small gradients survive float16, and skips steps whose gradients are not finite.

    Args:
        inner_optimizer: a Keras optimizer: Keras 3, tf-keras, tf-keras legacy; wrapped by
            ``npu_distributed_keras_optimizer_wrapper`` or not.
        dynamic: let the scale double after ``dynamic_growth_steps`` finite steps in a row, and halve (not below 1)
            after each step that isn't finite (default); otherwise it stays ``initial_scale``.
        initial_scale: the first scale; default 32768, and needed when ``dynamic`` is False.
        dynamic_growth_steps: default 2000; only when ``dynamic``.

    Raises:
        ValueError: ``dynamic=False`` without ``initial_scale`` or with ``dynamic_growth_steps``.
        TypeError: ``inner_optimizer`` is not a Keras optimizer, or is a loss-scale optimizer itself; ``dynamic`` is not
            a bool.

    Every instance is a ``LossScaleOptimizer`` of the inner optimizer's Keras too, and has in each Keras, besides that
    one's methods:

    * ``get_scaled_loss(loss)`` and ``get_unscaled_gradients(gradients)``. In Keras 3, where ``apply_gradients`` takes
      scaled gradients after ``scale_loss``, it takes gradients as they are after ``get_unscaled_gradients``.
    * ``loss_scale``: the scale, a float32 tensor of shape [].
    * ``inner_optimizer``.
    * ``last_step_finite``: a bool variable, whether the gradients of the last step were finite; at first False.

    A step is made when its gradients are finite on all ranks; otherwise only ``iterations`` grows, with a fixed scale
    too. Every rank has to make the call, unless the optimizer is wrapped for a group: then the members of the group.

    A saved model is loaded with ``custom_objects={"NpuLossScaleOptimizer": NpuLossScaleOptimizer}``.

    Source: Ascend TF Adapter 2.x, ``npu.train.optimizer.NpuLossScaleOptimizer``.
    """

    __module__ = "npu_device.train.optimizer"  # a saved model names the class by its public path

    def __new__(cls, inner_optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if issubclass(cls, KerasFamily):
            return super().__new__(cls)
        made = class_for(cls, inner_optimizer)
        return made.__new__(made, inner_optimizer, *args, **kwargs)

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> Any:
        """Return an optimizer like the one that gave this config; the inner one is a ``tf.keras`` optimizer."""
        config = dict(config)
        inner = config.pop("inner_optimizer")
        if isinstance(inner, dict):
            inner = tf.keras.optimizers.deserialize(inner, custom_objects=custom_objects)
        public_class: Any = next(base for base in cls.__mro__ if not issubclass(base, KerasFamily))
        return public_class(inner, **config)


def NpuExperimentalLossScaleOptimizer(optimizer: Any, loss_scale: Any) -> Any:
    """Return a ``NpuLossScaleOptimizer`` with the arguments of TensorFlow 2.3's experimental one.

    Args:
        optimizer: a Keras optimizer.
        loss_scale: ``"dynamic"``; a number, which stays; or a ``FixedLossScale`` or ``DynamicLossScale`` of
            ``tf.compat.v1.mixed_precision``.

    Returns:
        The optimizer.

    Raises:
        ValueError: a text other than ``"dynamic"``; a ``DynamicLossScale`` whose multiplier isn't 2.
        TypeError: as for ``NpuLossScaleOptimizer``.

    Source: Ascend TF Adapter 2.x, ``NpuExperimentalLossScaleOptimizer``.
    """
    if loss_scale == "dynamic":
        return NpuLossScaleOptimizer(optimizer)
    if isinstance(loss_scale, tf.compat.v1.mixed_precision.DynamicLossScale):
        if loss_scale.multiplier != 2:
            raise ValueError(f"the multiplier of a DynamicLossScale must be 2; found {loss_scale.multiplier}")
        return NpuLossScaleOptimizer(
            optimizer, initial_scale=loss_scale.initial_loss_scale, dynamic_growth_steps=loss_scale.increment_period
        )
    if isinstance(loss_scale, str):
        raise ValueError(f"loss_scale is {loss_scale!r}; expected 'dynamic' or a number")
    return NpuLossScaleOptimizer(optimizer, False, float(loss_scale() if callable(loss_scale) else loss_scale))
