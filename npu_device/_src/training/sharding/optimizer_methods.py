"""The methods of the user's optimizer that divided updates replace, on the instance and never on a class."""

from __future__ import annotations

import inspect
from functools import partial
from types import MethodType
from typing import Any, Callable

from npu_device._src import compat
from npu_device._src.training.sharding.divided_update import DividedUpdate
from npu_device._src.training.watching.schedule import only_building
from npu_device._src.training.watching.wrapped_optimizers import reducer_of


def install_methods(optimizer: Any) -> None:
    """Replace the methods of an optimizer by those that ask its ``DividedUpdate``."""
    for name, divided in _METHODS.items():
        setattr(optimizer, name, MethodType(_method_of_update(name, divided), optimizer))


def _method_of_update(name: str, divided: Callable) -> Callable:
    """Return a method that calls a function below with the divided update, and the method of the optimizer's class."""

    # Otherwise AutoGraph would rewrite it when an optimizer is called in a tf.function.
    @compat.do_not_convert
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        by_class = partial(getattr(type(self), name), self)
        # A deep copy of the instance has its own reducer, which divides nothing.
        update = getattr(reducer_of(self), "divided_update", None)
        if update is None:
            return by_class(*args, **kwargs)
        return divided(update, by_class, *args, **kwargs)

    return method


def _build(update: DividedUpdate, build: Callable, *args: Any, **kwargs: Any) -> None:
    # tf-keras builds in each step, which does nothing after the first time.
    if update.is_planned:
        build(*args, **kwargs)
        return
    # Each Keras has its own name for the argument.
    [variables] = (*args, *kwargs.values())
    reason = update.build(build, variables)
    if reason:
        reducer_of(update.optimizer).stop_dividing_updates(reason)


def _add_variable_from_reference(
    update: DividedUpdate, add: Callable, *args: Any, **kwargs: Any
) -> Any:
    slot = add(*args, **kwargs)
    arguments = inspect.signature(add).bind(*args, **kwargs).arguments
    undivided = [compat.ACCUMULATOR]
    if update.keeps_all_averages:
        undivided.append(compat.AVERAGE)
    # In tf-keras, the name has another name, and no slot is undivided.
    if arguments.get("name") not in undivided and compat.is_plain_variable(slot):
        variable = next(iter(arguments.values()))
        update.add_slot(slot, variable, arguments.get("initial_value"))
    return slot


def _clip_gradients(update: DividedUpdate, clip: Callable, gradients: Any) -> Any:
    # A rank without a share has none, of which Keras has no norm.
    if only_building.is_on and not gradients:
        return []
    if only_building.is_on or not compat.clips_by_global_norm(update.optimizer):
        return clip(gradients)
    return update.clip_by_global_norm(gradients)


def _update_averages(update: DividedUpdate, method: Callable, variables: Any) -> None:
    if update.keeps_all_averages:
        update.with_all_averages(partial(method, variables))
    elif update.optimizer.use_ema:
        update.with_own_averages(method, variables)


def _overwrite_with_averages(update: DividedUpdate, method: Callable, variables: Any) -> None:
    if update.keeps_all_averages or not update.is_planned:
        method(variables)
    else:
        update.with_own_averages(method, list(variables))


_METHODS: dict[str, Callable] = {
    "build": _build,
    "add_variable_from_reference": _add_variable_from_reference,
    "_clip_gradients": _clip_gradients,
    compat.UPDATE_AVERAGES: _update_averages,
    compat.OVERWRITE_WITH_AVERAGES: _overwrite_with_averages,
}
