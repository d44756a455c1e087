"""Hooks on gradients that pass through a Keras optimizer, for each family of optimizers.

Methods are replaced on the user's instance, never on a class. They are bound methods, so that a
deep copy of the optimizer has its own.
"""

from __future__ import annotations

from types import MethodType
from typing import Any, Callable

import tensorflow as tf

from npu_device._src import compat
from npu_device._src.trace.steps import iteration

_REDUCTION = "_npu_gradient_reduction"

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

    def apply(reduced: Any, variables: Any) -> Any:
        return type(self).apply_gradients(self, list(zip(reduced, variables)), *args, **kwargs)

    return apply_reduced(self, reduction, apply, grads, variables)


# Keras 3. `apply_gradients` and `fit` go through `apply`, which clips, accumulates and updates.


@_as_it_is
def _apply_keras_3(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
    variables = compat.variables_to_update(self, trainable_variables)

    def apply(reduced: Any, variables: Any) -> Any:
        return type(self).apply(self, reduced, None if trainable_variables is None else variables)

    return apply_reduced(self, getattr(self, _REDUCTION), apply, list(grads), variables)


def apply_reduced(
    optimizer: Any, reduction: Any, apply: Callable[..., Any], gradients: list[Any], variables: list[Any]
) -> Any:
    """Apply gradients after their reduction."""
    reduction.begin(optimizer, variables)
    reduced = reduction.reduce_to_apply(optimizer, gradients, variables)
    with iteration(), reduction.applying():
        return apply(reduced, variables)


def reduction_inside(optimizer: Any) -> Any:
    """Return the reduction of the optimizer inside a loss-scale optimizer of Keras 3 that isn't wrapped itself; else
    None.

    It calls the one inside only if the gradients are finite, on which all ranks must agree, or some wait forever. Keras
    makes it itself (compile under mixed_float16) without telling the inner one. So its gradients are reduced before it
    looks at them.
    """
    inner = getattr(optimizer, "inner_optimizer", None)
    return None if inner is None or reduction_of(optimizer) is not None else reduction_of(inner)


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
