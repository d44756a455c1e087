"""The methods of an optimizer that reduce its gradients before it uses them: replaced on the user's instance, never on
a class (``watching.optimizer_hook`` wraps those). They are bound methods, so that a deep copy of the optimizer has its
own.
"""

from __future__ import annotations

from types import MethodType
from typing import Any, Callable

import tensorflow as tf

from npu_device._src import compat
from npu_device._src.training.watching.partial_sums import methods_that_warn
from npu_device._src.training.watching.wrapped_optimizers import REDUCER

# Otherwise AutoGraph would rewrite the methods below when an optimizer is called in a tf.function.
_as_it_is = compat.do_not_convert


def install(optimizer: Any, reducer: Any) -> None:
    """Make an optimizer reduce its gradients by a ``GradientReducer``; raise TypeError for an unknown kind."""
    keras = compat.keras_of(optimizer)
    # The public method of all Keras optimizers, which scripts call.
    hooks: dict[str, Callable] = {"apply_gradients": _apply_gradients}
    if compat.is_keras_3(keras) and isinstance(optimizer, keras.optimizers.Optimizer):
        hooks["apply"] = _apply_keras_3
        hooks[compat.SUM_OVER_REPLICAS] = _sum_over_replicas
    else:
        aggregating = [
            name
            for name in ("aggregate_gradients", "_aggregate_gradients")
            if hasattr(optimizer, name)
        ]
        is_scaling = hasattr(optimizer, "inner_optimizer")
        if not hasattr(optimizer, "apply_gradients") or not (aggregating or is_scaling):
            class_name = f"{type(optimizer).__module__}.{type(optimizer).__name__}"
            raise TypeError(
                f"expected a Keras optimizer (Keras 3, tf-keras, legacy); found a {class_name}"
            )
        if not is_scaling:
            hooks[aggregating[0]] = _aggregate_gradients
    if reducer.accumulates(optimizer):
        hooks.update(methods_that_warn(compat.all_accumulators_of))
    setattr(optimizer, REDUCER, reducer)
    for name, hook in hooks.items():
        setattr(optimizer, name, MethodType(hook, optimizer))


# Methods of all optimizers. A custom class may clip, and thereby create new tensors, before the base class goes on to
# `apply` or to aggregation: gradients inside `apply_gradients` have been reduced.


@_as_it_is
def _apply_gradients(self: Any, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
    gradients, variables = _lists(grads_and_vars)

    def apply_by_class(reduced: Any, variables: Any) -> Any:
        pairs = list(zip(reduced, variables))
        return type(self).apply_gradients(self, pairs, *args, **kwargs)

    return getattr(self, REDUCER).apply(self, apply_by_class, gradients, variables)


# Methods for Keras 3: `apply_gradients` and `fit` go through `apply`, which clips, accumulates and updates.


@_as_it_is
def _apply_keras_3(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
    variables = compat.variables_to_update(self, trainable_variables)

    def apply_by_class(reduced: Any, updated: Any) -> Any:
        # Keras takes no variables for all of them; a divided update is given some.
        if trainable_variables is None and updated is variables:
            return type(self).apply(self, reduced)
        return type(self).apply(self, reduced, updated)

    return getattr(self, REDUCER).apply(self, apply_by_class, list(grads), variables)


@_as_it_is
def _sum_over_replicas(self: Any, grads_and_vars: Any) -> Any:
    # One replica has nothing to add up, and TensorFlow would keep the graph forever (``compat.sums_over_replicas``).
    if not tf.distribute.has_strategy():
        return list(grads_and_vars)
    return getattr(type(self), compat.SUM_OVER_REPLICAS)(self, grads_and_vars)


# Methods for tf-keras: `fit` and `minimize` go through `apply_gradients`; a loss-scale optimizer calls its inner
# optimizer's aggregation first, decides whether the gradients are finite, and then has them applied without
# aggregation.


@_as_it_is
def _aggregate_gradients(self: Any, grads_and_vars: Any) -> Any:
    optimizer_class = type(self)
    # Legacy optimizers have the name with the underscore.
    aggregate = (
        getattr(optimizer_class, "aggregate_gradients", None)
        or optimizer_class._aggregate_gradients
    )
    gradients, variables = _lists(grads_and_vars)
    reducer = getattr(self, REDUCER)
    reducer.begin_divided(self, variables)
    ready = reducer.ready_to_scale(self, gradients, variables)
    if ready is not None:
        return list(zip(ready, variables))
    reducer.begin(self, variables)
    pairs = list(zip(reducer.reduce_once(self, gradients), variables))
    if compat.sums_over_replicas(aggregate):
        compat.note_missing_gradients(aggregate, pairs)
    else:
        pairs = list(aggregate(self, pairs))
    # In eager steps TensorFlow's strategy has copied the gradients, so that the copies are noted, too.
    reducer.mark_reduced(gradient for gradient, _ in pairs)
    return pairs


def _lists(pairs: Any) -> tuple[list, list]:
    pairs = list(pairs)
    return [gradient for gradient, _ in pairs], [variable for _, variable in pairs]
