"""Hooks on gradients that pass through a Keras optimizer, for each family of optimizers.

Methods are replaced on the user's instance, never on a class. They are bound methods, so that a
deep copy of the optimizer has its own.
"""

from __future__ import annotations

import sys
from types import MethodType
from typing import Any, Callable

import tensorflow as tf

from npu_device._src import compat
from npu_device._src.trace.steps import iteration

_REDUCTION = "_npu_gradient_reduction"
_FRAMES = 6

# Otherwise AutoGraph would rewrite these when an optimizer is called in a tf.function.
_as_it_is = tf.autograph.experimental.do_not_convert


def is_wrapped(optimizer: Any) -> bool:
    """Return True when the optimizer, or the one inside a loss-scale optimizer, already reduces its gradients."""
    inner = getattr(optimizer, "inner_optimizer", None)
    return reduction_of(optimizer) is not None or (inner is not None and reduction_of(inner) is not None)


def reduction_of(optimizer: Any) -> Any:
    """Return the ``GradientReduction`` of a wrapped optimizer; None for another one."""
    return vars(optimizer).get(_REDUCTION)


def install(optimizer: Any, keras: Any, reduction: Any) -> None:
    """Make an optimizer reduce its gradients.

    Args:
        optimizer: the instance to change.
        keras: the Keras package that it belongs to.
        reduction: a ``GradientReduction``.

    Raises:
        TypeError: it isn't an optimizer of any known family.
    """
    if compat.is_keras_3(keras) and isinstance(optimizer, keras.optimizers.Optimizer):
        hooks: dict[str, Callable[..., Any]] = {
            "apply_gradients": _apply_gradients,
            "apply": _apply_keras_3,
            "build": _build_keras_3,
        }
    elif not hasattr(optimizer, "apply_gradients"):
        raise TypeError(
            f"expected a Keras optimizer; found a {type(optimizer).__module__}.{type(optimizer).__name__}, which has "
            "no apply_gradients"
        )
    elif hasattr(optimizer, "inner_optimizer"):
        hooks = {"apply_gradients": _apply_gradients}
    elif hasattr(optimizer, "aggregate_gradients"):
        hooks = {"apply_gradients": _apply_gradients, "aggregate_gradients": _aggregate_gradients}
    elif hasattr(optimizer, "_aggregate_gradients"):
        hooks = {"apply_gradients": _apply_gradients, "_aggregate_gradients": _aggregate_gradients_legacy}
    else:
        raise TypeError(
            f"a {type(optimizer).__module__}.{type(optimizer).__name__} is not a Keras optimizer of a known kind "
            "(Keras 3, tf-keras, legacy)"
        )
    setattr(optimizer, _REDUCTION, reduction)
    for name, hook in hooks.items():
        setattr(optimizer, name, MethodType(hook, optimizer))


# All. A custom class may clip, and thereby create new tensors, before the base class goes on to `apply` or to
# aggregation: gradients inside `apply_gradients` have been reduced.


@_as_it_is
def _apply_gradients(self: Any, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
    reduction = getattr(self, _REDUCTION)
    grads, variables = _lists(grads_and_vars)
    reduction.begin(self, variables)
    with reduction.audited(self, grads, variables):
        grads = reduction.reduce_to_apply(self, grads, variables)
        with iteration(), reduction.applying():
            return type(self).apply_gradients(self, list(zip(grads, variables)), *args, **kwargs)


# Keras 3. `apply_gradients` and `fit` go through `apply`, which clips, accumulates and updates.


@_as_it_is
def _apply_keras_3(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
    reduction, grads = getattr(self, _REDUCTION), list(grads)
    _require_agreement(_called_by(self))
    variables = list(self._trainable_variables if trainable_variables is None else trainable_variables)
    reduction.begin(self, variables)
    with reduction.audited(self, grads, variables), iteration():
        return type(self).apply(self, reduction.reduce_to_apply(self, grads, variables), trainable_variables)


@_as_it_is
def _build_keras_3(self: Any, variables: Any) -> Any:
    # A loss-scale optimizer around this one calls `apply` only if the gradients are finite, on which all ranks must
    # agree, or some wait forever. Keras creates that loss-scale optimizer itself (compile under mixed_float16) without
    # telling the inner one, so it can only be found in this call, which its `build` makes.
    outer = _called_by(self)
    if outer is not None:
        outer.check_finite = MethodType(_check_finite, outer)
    return type(self).build(self, variables)


def _require_agreement(outer: Any) -> None:
    """Raise RuntimeError if a loss-scale optimizer decides on this rank alone whether its gradients are finite."""
    if outer is not None and "check_finite" not in vars(outer) and compat.belongs_to_keras(type(outer).apply):
        raise RuntimeError(
            f"the optimizer inside a {type(outer).__name__} was wrapped after that one had been built: the ranks could "
            "not agree on which steps to skip.\nWhat to do: wrap the loss-scale optimizer itself, with "
            "npu_distributed_keras_optimizer_wrapper(optimizer), not its inner_optimizer."
        )


def _called_by(optimizer: Any) -> Any:
    """Return the loss-scale optimizer among the callers that wraps this optimizer, or None."""
    frame = sys._getframe(2)
    for _ in range(_FRAMES):  # its `build` calls directly, except for decorators in between
        caller = frame.f_locals.get("self")
        if caller is not optimizer and getattr(caller, "inner_optimizer", None) is optimizer:
            return caller if hasattr(caller, "check_finite") else None
        if frame.f_back is None:
            return None
        frame = frame.f_back
    return None


@_as_it_is
def _check_finite(self: Any, grads: Any) -> Any:
    reduction = getattr(self.inner_optimizer, _REDUCTION)
    return reduction.finite_everywhere(type(self).check_finite(self, grads))


# tf-keras. `fit` and `minimize` go through `apply_gradients`; a loss-scale optimizer calls its inner optimizer's
# aggregation first, decides whether the gradients are finite, and then has them applied without aggregation.


@_as_it_is
def _aggregate_gradients(self: Any, grads_and_vars: Any) -> Any:
    return type(self).aggregate_gradients(self, _reduce_pairs(self, grads_and_vars))


@_as_it_is
def _aggregate_gradients_legacy(self: Any, grads_and_vars: Any) -> Any:
    return type(self)._aggregate_gradients(self, _reduce_pairs(self, grads_and_vars))


def _reduce_pairs(optimizer: Any, grads_and_vars: Any) -> list[tuple[Any, Any]]:
    gradients, variables = _lists(grads_and_vars)
    getattr(optimizer, _REDUCTION).begin(optimizer, variables)
    return list(zip(getattr(optimizer, _REDUCTION).reduce_once(gradients), variables))


def _lists(pairs: Any) -> tuple[list[Any], list[Any]]:
    """Return the gradients and the variables."""
    pairs = list(pairs)
    return [gradient for gradient, _ in pairs], [variable for _, variable in pairs]
