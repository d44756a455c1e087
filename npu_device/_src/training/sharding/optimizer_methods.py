"""The methods of the user's optimizer that divided updates replace, on the instance and never on a class."""

from __future__ import annotations

from functools import partial
from types import MethodType
from typing import Any, Callable

import tensorflow as tf

from npu_device._src import compat
from npu_device._src.training.watching.schedule import only_building
from npu_device._src.training.watching.wrapped_optimizers import reducer_of

# Otherwise AutoGraph would rewrite the methods below when an optimizer is called in a tf.function.
_as_it_is = tf.autograph.experimental.do_not_convert


def install_methods(optimizer: Any) -> None:
    """Replace the methods of an optimizer by those that ask its ``DividedUpdate``."""
    methods = _KERAS_3
    if not compat.of_keras_3(optimizer):
        methods = _TF_KERAS
    for name, method in methods.items():
        setattr(optimizer, name, MethodType(method, optimizer))


def _update_of(optimizer: Any) -> Any:
    # A deep copy of the instance has its own reducer, which divides nothing.
    return getattr(reducer_of(optimizer), "divided_update", None)


@_as_it_is
def _build(self: Any, variables: Any) -> None:
    update = _update_of(self)
    if update is None or self.built:
        type(self).build(self, variables)
        return
    reason = update.build(partial(type(self).build, self), variables)
    if reason:
        reducer_of(self).stop_dividing_updates(reason)


@_as_it_is
def _add_variable_from_reference(
    self: Any, reference_variable: Any, *args: Any, **kwargs: Any
) -> Any:
    add = type(self).add_variable_from_reference
    slot = add(self, reference_variable, *args, **kwargs)
    update = _update_of(self)
    if update is not None:
        arguments = dict(zip(("name", "initializer"), args), **kwargs)
        undivided = [compat.ACCUMULATOR]
        if update.averages_are_whole:
            undivided.append(compat.AVERAGE)
        if arguments.get("name") not in undivided:
            initializer = arguments.get("initializer", "zeros")
            update.add_slot(slot, reference_variable, initializer)
    return slot


@_as_it_is
def _clip_gradients(self: Any, grads: Any) -> Any:
    update = _update_of(self)
    # A rank without a share has none, of which Keras has no norm.
    if update is not None and only_building.is_on and not grads:
        return []
    if update is None or only_building.is_on or not compat.clips_by_global_norm(self):
        return type(self)._clip_gradients(self, grads)
    return update.clip_by_global_norm(grads)


@_as_it_is
def _update_averages(self: Any, trainable_variables: Any) -> None:
    update = _update_of(self)
    method = getattr(type(self), compat.UPDATE_AVERAGES)
    if update is None:
        method(self, trainable_variables)
    elif update.averages_are_whole:
        update.with_all_averages(partial(method, self, trainable_variables))
    elif self.use_ema:
        update.with_own_averages(partial(method, self))


@_as_it_is
def _overwrite_with_averages(self: Any, trainable_variables: Any) -> None:
    update = _update_of(self)
    method = getattr(type(self), compat.OVERWRITE_WITH_AVERAGES)
    if update is None or update.averages_are_whole:
        method(self, trainable_variables)
    else:
        update.with_own_averages(partial(method, self))


@_as_it_is
def _build_in_tf_keras(self: Any, var_list: Any) -> None:
    update = _update_of(self)
    # tf-keras builds in each step, which does nothing after the first time.
    if update is None or update.is_planned:
        type(self).build(self, var_list)
        return
    reason = update.build(partial(type(self).build, self), var_list)
    if reason:
        reducer_of(self).stop_dividing_updates(reason)


@_as_it_is
def _add_variable_in_tf_keras(
    self: Any,
    model_variable: Any,
    variable_name: Any,
    shape: Any = None,
    initial_value: Any = None,
) -> Any:
    add = type(self).add_variable_from_reference
    slot = add(self, model_variable, variable_name, shape, initial_value)
    update = _update_of(self)
    if update is not None and compat.is_plain_variable(slot):
        update.add_slot(slot, model_variable, initial_value)
    return slot


@_as_it_is
def _overwrite_in_tf_keras(self: Any, var_list: Any) -> None:
    update = _update_of(self)
    method = getattr(type(self), compat.OVERWRITE_WITH_AVERAGES)
    if update is None or not update.is_planned:
        method(self, var_list)
    else:
        update.overwrite(partial(method, self), list(var_list))


_KERAS_3: dict[str, Callable] = {
    "build": _build,
    "add_variable_from_reference": _add_variable_from_reference,
    "_clip_gradients": _clip_gradients,
    compat.UPDATE_AVERAGES: _update_averages,
    compat.OVERWRITE_WITH_AVERAGES: _overwrite_with_averages,
}

_TF_KERAS: dict[str, Callable] = {
    "build": _build_in_tf_keras,
    "add_variable_from_reference": _add_variable_in_tf_keras,
    "_clip_gradients": _clip_gradients,
    compat.OVERWRITE_WITH_AVERAGES: _overwrite_in_tf_keras,
}
