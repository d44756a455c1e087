"""``NpuLossScaleOptimizer`` in each Keras: a subclass of that Keras's own ``LossScaleOptimizer``, created when the
first optimizer of that Keras is wrapped.
"""

from __future__ import annotations

import functools
from typing import Any

import tensorflow as tf

from npu_device._src import compat
from npu_device._src.training.loss_scale_step import LastStep, apply_if_finite, reduced_and_finite, unscaled

_INITIAL_SCALE = 2.0**15
_GROWTH_STEPS = 2000
_FACTOR = 2.0
_LARGEST = 3.4e38

_as_it_is = tf.autograph.experimental.do_not_convert
_Keras: Any = object  # the Keras class that follows a family in the method resolution order


class KerasFamily(_Keras):
    """The parts that are the same in every Keras."""

    _last_step: LastStep

    @property
    def last_step_finite(self) -> Any:
        """Return a bool variable that is True when the gradients of the last step were finite; False at first."""
        return self._last_step.finite

    def _step(self, gradients: Any, apply: Any) -> None:
        gradients, finite = reduced_and_finite(self, gradients)

        def settle(finite: tf.Tensor) -> None:
            self._last_step.finite.assign(finite)
            if self.dynamic:
                self._update_scale(finite)

        apply_if_finite(finite, gradients, apply, lambda: self.iterations.assign_add(1), settle)


class Keras3Family(KerasFamily):
    """Keras 3, whose own class has a dynamic scale only, takes scaled gradients and knows nothing of ranks."""

    built: bool

    def __init__(
        self,
        inner_optimizer: Any,
        dynamic: bool = True,
        initial_scale: float | None = None,
        dynamic_growth_steps: int | None = None,
        name: str | None = None,
    ) -> None:
        if not isinstance(dynamic, bool):
            raise TypeError(f"dynamic must be a bool; found {dynamic!r}")
        if hasattr(inner_optimizer, "inner_optimizer"):
            raise TypeError("the inner optimizer of a loss-scale optimizer is a loss-scale optimizer itself")
        if not dynamic and initial_scale is None:
            raise ValueError("dynamic=False needs an initial_scale, which the scale then keeps; found None")
        if not dynamic and dynamic_growth_steps is not None:
            raise ValueError(f"dynamic_growth_steps goes with dynamic=True only; found {dynamic_growth_steps}")
        super().__init__(
            inner_optimizer,
            initial_scale=float(_INITIAL_SCALE if initial_scale is None else initial_scale),
            dynamic_growth_steps=_GROWTH_STEPS if dynamic_growth_steps is None else int(dynamic_growth_steps),
            name=name,
        )
        self.dynamic = dynamic
        self._last_step = LastStep()
        self._takes_scaled_gradients = True

    @property
    def loss_scale(self) -> tf.Tensor:
        """Return the scale: float32, shape []."""
        return tf.cast(tf.convert_to_tensor(self.dynamic_scale if self.built else self.initial_scale), tf.float32)

    def get_scaled_loss(self, loss: Any) -> Any:
        """Return the loss times the scale; for a function, a function."""
        if callable(loss):
            return lambda: self.get_scaled_loss(loss())
        return loss * tf.cast(self.loss_scale, loss.dtype)

    def get_unscaled_gradients(self, gradients: Any) -> list[Any]:
        """Return the gradients divided by the scale, ``None`` where ``None`` was; ``apply_gradients`` then doesn't
        divide.
        """
        self._takes_scaled_gradients = False
        scale = self.loss_scale
        return [unscaled(gradient, scale) for gradient in gradients]

    def scale_loss(self, loss: Any) -> Any:
        """Return the loss times the scale; ``apply_gradients`` then divides the gradients."""
        self._takes_scaled_gradients = True
        return super().scale_loss(loss)

    def apply_gradients(self, grads_and_vars: Any, name: str | None = None) -> Any:
        """Make or skip a step; ``name`` has no effect."""
        return super().apply_gradients(grads_and_vars)

    @_as_it_is
    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Make or skip a step. Called by ``apply_gradients`` and ``fit``."""
        variables = None if trainable_variables is None else list(trainable_variables)
        if not self.built:
            self.build(variables)
            self.built = True
        scale = self.loss_scale
        gradients = [unscaled(gradient, scale) for gradient in grads] if self._takes_scaled_gradients else list(grads)
        self._step(gradients, lambda gradients: self.inner_optimizer.apply(gradients, variables))

    def _update_scale(self, finite: tf.Tensor) -> None:
        scale = self.loss_scale
        counted = tf.convert_to_tensor(self.step_counter)
        none = tf.zeros_like(counted)
        good = tf.where(finite, counted + 1, none)
        grow = good >= self.dynamic_growth_steps
        larger = tf.where(scale < _LARGEST / _FACTOR, scale * _FACTOR, scale)
        smaller = tf.maximum(scale / _FACTOR, 1.0)
        self.dynamic_scale.assign(tf.where(finite, tf.where(grow, larger, scale), smaller))
        self.step_counter.assign(tf.where(grow, none, good))

    def get_config(self) -> dict[str, Any]:
        """Return Keras's own config, and whether the scale is dynamic."""
        growth_steps = self.dynamic_growth_steps if self.dynamic else None
        return {**super().get_config(), "dynamic": self.dynamic, "dynamic_growth_steps": growth_steps}


class TfKerasFamily(KerasFamily):
    """tf-keras, new and legacy, whose own classes know nothing of ranks and skip no step when the scale is fixed."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._last_step = LastStep()

    @_as_it_is
    def apply_gradients(self, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        """Make or skip a step. Called by ``minimize`` and ``fit``. Other arguments go to the inner optimizer."""
        pairs = list(grads_and_vars)
        variables = [variable for _, variable in pairs]
        if hasattr(self.inner_optimizer, "build"):
            with tf.init_scope():
                self.inner_optimizer.build(variables)

        def apply(gradients: Any) -> None:
            self.inner_optimizer.apply_gradients(list(zip(gradients, variables)), *args, **kwargs)

        self._step([gradient for gradient, _ in pairs], apply)
        return self.iterations

    def _update_scale(self, finite: tf.Tensor) -> None:
        # tf-keras's own state, which checks by itself whether its input is finite.
        self._loss_scale.update([tf.where(finite, 0.0, float("nan"))])


def class_for(public_class: type, optimizer: Any) -> Any:
    """Return the class of a loss-scale optimizer around a Keras optimizer; ``public_class`` is
    ``NpuLossScaleOptimizer`` or a subclass of it.

    Raises:
        TypeError: it isn't a Keras optimizer.
    """
    keras = compat.keras_of(optimizer)
    if compat.is_keras_3(keras) and isinstance(optimizer, keras.optimizers.Optimizer):
        return _made(public_class, Keras3Family, keras.optimizers.LossScaleOptimizer)
    if not hasattr(optimizer, "apply_gradients") or compat.is_keras_3(keras):
        raise TypeError(
            f"expected a Keras optimizer to scale the loss for; found a {type(optimizer).__module__}."
            f"{type(optimizer).__name__}"
        )
    return _made(public_class, TfKerasFamily, compat.loss_scale_class_of_tf_keras(keras, optimizer))


@functools.cache
def _made(public_class: type, family: type, base: type) -> type:
    return type(
        public_class.__name__,
        (public_class, family, base),
        {"__module__": public_class.__module__, "__doc__": public_class.__doc__},
    )
