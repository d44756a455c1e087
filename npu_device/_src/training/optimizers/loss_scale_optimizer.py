"""``npu.train.optimizer``: a loss-scale optimizer for whichever Keras the optimizer inside belongs to.

It is a subclass of that Keras's own ``LossScaleOptimizer``, created when the first optimizer of that Keras is wrapped.
All ranks agree whether gradients are finite, and apply or skip them. Importing this file imports no Keras.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from npu_device._src import compat
from npu_device._src.gradients.reduction import all_finite, with_values
from npu_device._src.training.distribute.reduce_values import all_reduce
from npu_device._src.training.watching.wrapped_optimizers import is_wrapped, reducer_of

_INITIAL_SCALE, _GROWTH_STEPS = 2.0**15, 2000
# The factor of growth, and the largest scale, just below the largest float32.
_FACTOR, _LARGEST = 2.0, 3.4e38

_as_it_is = compat.do_not_convert
_Keras: Any = object  # the Keras class that follows a family in the method resolution order


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

    Every instance is a ``LossScaleOptimizer`` of the Keras of the inner optimizer too, and has in each Keras, besides
    the methods of that one:

    * ``get_scaled_loss(loss)`` and ``get_unscaled_gradients(gradients)``. In Keras 3, where ``apply_gradients`` takes
      scaled gradients after ``scale_loss``, it takes gradients as they are after ``get_unscaled_gradients``.
    * ``loss_scale``: the scale, a float32 tensor of shape [].
    * ``inner_optimizer``.
    * ``last_step_finite``: a bool variable, whether the gradients of the last step were finite; at first False.

    A step is made when its gradients are finite on all ranks; otherwise only ``iterations`` grows, with a fixed scale
    too, and nothing with ``gradient_accumulation_steps``. Every rank has to make the call, unless the optimizer is
    wrapped for a group: then the members of the group.

    A saved model is loaded with ``custom_objects={"NpuLossScaleOptimizer": NpuLossScaleOptimizer}``.

    Source: Ascend TF Adapter 2.x, ``npu.train.optimizer.NpuLossScaleOptimizer``.
    """

    # A saved model names the class by its public path.
    __module__ = "npu_device.train.optimizer"

    def __new__(cls, inner_optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        # The class of a family is made by ``_class_of_family``, and already has its Keras.
        if issubclass(cls, _KerasFamily):
            return super().__new__(cls)
        public_class: Any = cls
        keras = compat.keras_of(inner_optimizer)
        if compat.is_keras_3(keras) and isinstance(inner_optimizer, keras.optimizers.Optimizer):
            bases: tuple = (_Keras3Family, keras.optimizers.LossScaleOptimizer)
        elif hasattr(inner_optimizer, "apply_gradients") and not compat.is_keras_3(keras):
            keras_class = compat.loss_scale_class_of_tf_keras(keras, inner_optimizer)
            bases = (_TfKerasFamily, keras_class)
        else:
            class_name = f"{type(inner_optimizer).__module__}.{type(inner_optimizer).__name__}"
            raise TypeError(
                f"expected a Keras optimizer to scale the loss for; found a {class_name}"
            )
        family_class: Any = _class_of_family(public_class, *bases)
        return family_class.__new__(family_class, inner_optimizer, *args, **kwargs)

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> Any:
        """Return an optimizer like the one that gave this config; the inner one is a ``tf.keras`` optimizer."""
        config = dict(config)
        inner = config.pop("inner_optimizer")
        if isinstance(inner, dict):
            inner = tf.keras.optimizers.deserialize(inner, custom_objects=custom_objects)
        # The public class, which chooses the family anew: the inner optimizer may be of another Keras.
        public_class: Any = next(base for base in cls.__mro__ if not issubclass(base, _KerasFamily))
        return public_class(inner, **config)


def NpuExperimentalLossScaleOptimizer(optimizer: Any, loss_scale: Any) -> Any:
    """Return a ``NpuLossScaleOptimizer`` with the arguments of the experimental one of TensorFlow 2.3.

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
        # Keras's scale always grows by 2.
        if loss_scale.multiplier != 2:
            raise ValueError(
                f"the multiplier of a DynamicLossScale must be 2; found {loss_scale.multiplier}"
            )
        return NpuLossScaleOptimizer(
            optimizer,
            initial_scale=loss_scale.initial_loss_scale,
            dynamic_growth_steps=loss_scale.increment_period,
        )
    if isinstance(loss_scale, str):
        raise ValueError(f"loss_scale is {loss_scale!r}; expected 'dynamic' or a number")
    if callable(loss_scale):
        loss_scale = loss_scale()
    return NpuLossScaleOptimizer(optimizer, False, float(loss_scale))


def unscaled(gradient: Any, scale: tf.Tensor) -> Any:
    """Return a gradient divided by the scale; a tensor, ``tf.IndexedSlices`` or None."""

    def quotient(values: tf.Tensor) -> tf.Tensor:
        dtype = values.dtype
        # In float16, a scale above 65504 is infinite, and the gradient would become 0.
        if dtype.size < tf.float32.size:
            dtype = tf.float32
        return tf.cast(tf.cast(values, dtype) / tf.cast(scale, dtype), values.dtype)

    return with_values(gradient, quotient)


def on_all_ranks(finite: tf.Tensor) -> tf.Tensor:
    """Return whether it is so on every rank; each has to call this."""
    flag = tf.cast(finite, tf.int32)
    return tf.cast(all_reduce(flag, "min", fusion=0), tf.bool)


def _discard(result: object) -> None:
    """Return None: both branches of a condition must return the same, and their operations have run by then."""


# The optimizer in each Keras


class _KerasFamily(_Keras):
    """The parts that are the same in every Keras."""

    last_step_finite: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Set past Keras's own ``__setattr__``, which would track the variable as something to save.
        flag = compat.plain_variable(False, name="npu_last_step_finite")
        object.__setattr__(self, "last_step_finite", flag)

    def _skip(self) -> Any:
        """Count a step that isn't made, unless gradients are added up: an update has those of as many finite steps."""
        if compat.accumulation_steps(self.inner_optimizer) == 1:
            self.iterations.assign_add(1)

    def _step(self, gradients: list, variables: list, apply: Callable[[Sequence], Any]) -> None:
        """Apply the gradients if they are finite on all ranks, else only count the step; then update the scale."""
        # Gradients of a wrapped inner optimizer are reduced here already, while backward still produces others; the
        # inner one recognises them. Reduced gradients are the same everywhere, so no agreement is needed.
        inner = reducer_of(self.inner_optimizer)
        if inner is not None and inner.accumulates(self.inner_optimizer):
            finite = inner.agree(all_finite(gradients))
        elif inner is not None and inner.divided_update is not None:
            gradients, finite = inner.reduced_for_scale(self, gradients, variables)
            # The inner optimizer must not reduce them once more.
            apply = functools.partial(inner.apply_ready, self, apply)
        else:
            if inner is not None:
                gradients = inner.reduce_once(self.inner_optimizer, gradients)
            finite = all_finite(gradients)
            if not is_wrapped(self):
                finite = on_all_ranks(finite)

        def apply_if_finite(finite: tf.Tensor, apply: Callable[[], Any]) -> None:
            # Decided by a condition of the graph, since the other branch must not move variables.
            tf.cond(finite, lambda: _discard(apply()), lambda: _discard(self._skip()))
            self.last_step_finite.assign(finite)
            if self.dynamic:
                self._update_scale(finite)

        if not tf.distribute.has_strategy():
            apply_if_finite(finite, lambda: apply(gradients))
            return

        # Under a strategy, optimizers leave the replica context to update variables, which is impossible in a branch of
        # a condition; and variables like the scale can only be assigned outside it.
        def outside(strategy: Any, finite: Any, gradients: Any) -> None:
            everywhere = tf.reduce_all(strategy.experimental_local_results(finite))
            apply_if_finite(
                everywhere,
                lambda: strategy.extended.call_for_each_replica(apply, args=(gradients,)),
            )

        replica = tf.distribute.get_replica_context()
        if replica is None:
            raise ValueError(
                "a loss-scale optimizer was called outside of a replica of the tf.distribute strategy.\n"
                "What to do: call apply_gradients in the function that strategy.run runs."
            )
        replica.merge_call(outside, args=(finite, gradients))


class _Keras3Family(_KerasFamily):
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
            raise TypeError(
                "the inner optimizer of a loss-scale optimizer is a loss-scale optimizer itself\n"
                "What to do: pass the plain optimizer."
            )
        if not dynamic and initial_scale is None:
            raise ValueError(
                "dynamic=False needs an initial_scale, which the scale then keeps; found None"
            )
        if not dynamic and dynamic_growth_steps is not None:
            raise ValueError(
                f"dynamic_growth_steps goes with dynamic=True only; found {dynamic_growth_steps}"
            )
        if initial_scale is None:
            initial_scale = _INITIAL_SCALE
        if dynamic_growth_steps is None:
            dynamic_growth_steps = _GROWTH_STEPS
        super().__init__(
            inner_optimizer,
            initial_scale=float(initial_scale),
            dynamic_growth_steps=int(dynamic_growth_steps),
            name=name,
        )
        self.dynamic = dynamic
        self._takes_scaled_gradients = True

    @property
    def loss_scale(self) -> tf.Tensor:
        """Return the scale: float32, shape []."""
        scale = self.initial_scale
        # Keras makes the variable when the optimizer is built.
        if self.built:
            scale = self.dynamic_scale
        return tf.cast(tf.convert_to_tensor(scale), tf.float32)

    def get_scaled_loss(self, loss: Any) -> Any:
        """Return the loss times the scale; for a function, a function."""
        if callable(loss):
            return lambda: self.get_scaled_loss(loss())
        return loss * tf.cast(self.loss_scale, loss.dtype)

    def get_unscaled_gradients(self, gradients: Any) -> list:
        """Return the gradients divided by the scale, or ``None``, which ``apply_gradients`` then takes as they are."""
        # Remembered until ``scale_loss`` is called again: which of the two the script uses is its own choice.
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
        variables = None
        if trainable_variables is not None:
            variables = list(trainable_variables)
        updated = compat.variables_to_update(self, variables)
        reducer = reducer_of(self.inner_optimizer)
        if reducer is not None:
            reducer.begin_divided(self, updated)
        # Keras would build in ``apply``, within the branch for finite gradients, where variables can't be made.
        if not self.built:
            self.build(variables)
            self.built = True
        scale = self.loss_scale
        gradients = list(grads)
        if self._takes_scaled_gradients:
            gradients = [unscaled(gradient, scale) for gradient in grads]
        apply_inner = self.inner_optimizer.apply
        self._step(gradients, updated, lambda gradients: apply_inner(gradients, variables))

    def _update_scale(self, finite: tf.Tensor) -> None:
        scale = self.loss_scale
        counted = tf.convert_to_tensor(self.step_counter)
        zero = tf.zeros_like(counted)
        good = tf.where(finite, counted + 1, zero)
        grow = good >= self.dynamic_growth_steps
        larger = tf.where(scale < _LARGEST / _FACTOR, scale * _FACTOR, scale)
        smaller = tf.maximum(scale / _FACTOR, 1.0)
        if_finite = tf.where(grow, larger, scale)
        self.dynamic_scale.assign(tf.where(finite, if_finite, smaller))
        self.step_counter.assign(tf.where(grow, zero, good))

    def get_config(self) -> dict[str, Any]:
        """Return Keras's own config, and whether the scale is dynamic."""
        growth_steps = None
        if self.dynamic:
            growth_steps = self.dynamic_growth_steps
        return {
            **super().get_config(),
            "dynamic": self.dynamic,
            "dynamic_growth_steps": growth_steps,
        }


class _TfKerasFamily(_KerasFamily):
    """tf-keras, new and legacy, whose own classes know nothing of ranks and skip no step when the scale is fixed."""

    @_as_it_is
    def apply_gradients(self, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        """Make or skip a step. Called by ``minimize`` and ``fit``. Other arguments go to the inner optimizer."""
        pairs = list(grads_and_vars)
        variables = [variable for _, variable in pairs]
        reducer = reducer_of(self.inner_optimizer)
        if reducer is not None:
            reducer.begin_divided(self.inner_optimizer, variables)
        # Slots have to be made outside of the condition's branches.
        with tf.init_scope():
            compat.build_optimizer(self.inner_optimizer, variables)

        def apply(gradients: Any) -> None:
            inner_pairs = list(zip(gradients, variables))
            self.inner_optimizer.apply_gradients(inner_pairs, *args, **kwargs)

        self._step([gradient for gradient, _ in pairs], variables, apply)
        return self.iterations

    def _update_scale(self, finite: tf.Tensor) -> None:
        # NaN stands for gradients that aren't finite, which tf-keras's own state checks by itself.
        self._loss_scale.update([tf.where(finite, 0.0, float("nan"))])


@functools.cache
# A family has one class, since saved models and ``isinstance`` compare classes.
def _class_of_family(public_class: type, family: type, base: type) -> type:
    attributes = {"__module__": public_class.__module__, "__doc__": public_class.__doc__}
    return type(public_class.__name__, (public_class, family, base), attributes)
