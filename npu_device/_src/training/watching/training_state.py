"""The variables that training a Keras model changes: its weights, and the state of its optimizers.

They are listed in an order that doesn't depend on when they were created, and may be created before the first step.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import random
import types
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Callable

import numpy as np
import tensorflow as tf

from npu_device._src import compat
from npu_device._src.training.watching.schedule import only_building


def training_variables(model: Any) -> list[Any]:
    """Return the weights and the state of the optimizers, as far as they exist, in the same order on every rank."""
    return unique([*weights(model), *optimizer_state(model)])


def weights(model: Any) -> list[Any]:
    """Return the weights of the model, as far as they exist."""
    try:
        found = model.weights
    except ValueError:  # tf-keras: a part isn't built
        found = compat.variables_of(model)
    return unique(weight for weight in found if not compat.is_vocabulary(weight))


def optimizer_state(model: Any) -> list[Any]:
    """Return the variables of the model's optimizers: steps, slots, averages, learning rates and loss scales."""
    states = (
        compat.optimizer_variables(optimizer, weights(model)) for optimizer in optimizers(model)
    )
    return unique(itertools.chain.from_iterable(states))


def optimizers(model: Any) -> list[Any]:
    """Return the optimizers that the steps of a model can reach: a GAN has two, and parts of it may have their own."""
    return [thing for thing in reachable(model) if compat.is_optimizer(thing)]


def loose_variables(model: Any) -> list[Any]:
    """Return the ``tf.Variable`` objects that the steps can reach, but that Keras doesn't count among its variables."""
    metrics = (variable for metric in compat.metrics_of(model) for variable in metric.variables)
    known = {
        id(variable)
        for variable in [*compat.variables_of(model), *metrics, *compat.counters_of(model)]
    }
    known |= set(map(id, compat.states_of_samples(model)))
    return [
        thing
        for thing in reachable(model)
        if isinstance(thing, tf.Variable) and id(thing) not in known
    ]


def common(model: Any, variables: Iterable[Any]) -> list[Any]:
    """Return variables of a model without those that hold a state for each sample, of which each rank has its own."""
    own = set(map(id, compat.states_of_samples(model)))
    return [variable for variable in variables if id(variable) not in own]


def attributes(model: Any) -> Iterable[Any]:
    """Return the attributes of the model, and what lists and dicts among them contain."""
    for value in _attributes(model):
        yield from (
            value.values()
            if isinstance(value, dict)
            else value
            if isinstance(value, (list, tuple))
            else [value]
        )


def has_all_layers_built(model: Any) -> bool:
    return all(layer.built for layer in compat.all_layers(model)[1:])


def uses_keras_step(model: Any) -> bool:
    """Return True when ``fit`` uses Keras's own step, which updates the trainable variables with one optimizer."""
    return "train_step" not in vars(model) and compat.belongs_to_keras(type(model).train_step)


def build_optimizer(model: Any) -> None:
    """Make the optimizer state of a built model, for the step of Keras. Existing state stays as it is."""
    if getattr(model, "optimizer", None) is not None:
        compat.build_optimizer(model.optimizer, model.trainable_variables)


def trace_step(model: Any, step: Callable[[Any], Any], batch_spec: Any) -> None:
    """Make all variables that a step of a model makes by tracing it with a ``tf.TypeSpec``; nothing is computed."""
    autograph = not compat.is_keras_3(
        compat.keras_of(model)
    )  # as each Keras traces the step itself
    with only_building():
        tf.function(step, autograph=autograph).get_concrete_function(batch_spec)


def call_on(model: Any, batch: Any) -> None:
    """Build a model that runs eagerly by calling it on a batch, and its optimizer for Keras's own step."""
    try:
        model(batch[0] if isinstance(batch, tuple) else batch)
    except Exception as error:
        raise RuntimeError(
            "the root can't send weights before the first step: the model is not built, and calling it on its "
            f"first batch fails ({type(error).__name__}: {error}).\n"
            "What to do: build the model before fit, on every rank, or compile it without run_eagerly=True."
        ) from error
    if uses_keras_step(model):
        build_optimizer(model)


def random_states() -> tuple[Any, Any, Any]:
    """Return the random states of Python, numpy and TensorFlow."""
    return random.getstate(), np.random.get_state(), compat.random_state()


def set_random_states(states: tuple[Any, Any, Any]) -> None:
    python, numpy, tensorflow = states
    random.setstate(python)
    np.random.set_state(numpy)
    if compat.random_state() != tensorflow:
        compat.set_random_state(tensorflow)


def unique(things: Iterable[Any]) -> list[Any]:
    """Return things in their order, each of them once."""
    return list({id(thing): thing for thing in things}.values())


_FRAMEWORKS = {
    "keras",
    "tf_keras",
    "tensorflow",
    "numpy",
    "npu_device",
    "builtins",
    "logging",
    "threading",
    "wrapt",
}
_LONGEST = 1000  # elements of a list or dict that are looked at: optimizers and variables aren't kept by the thousand


def reachable(model: Any) -> Iterator[Any]:
    """Yield a model and what it reaches, each once, in the same order on every rank.

    That are attributes of it and of its layers; what is in lists, dicts and objects of the user's own classes; and what
    the user's functions use: closures, defaults, globals. Other objects of TensorFlow and Keras aren't looked into.
    """
    waiting = deque([model])
    seen: dict[int, Any] = {}
    while waiting:
        thing = waiting.popleft()
        if id(thing) not in seen:
            seen[id(thing)] = thing
            yield thing
            waiting.extend(_parts(thing))


def _parts(thing: Any) -> Iterable[Any]:
    if isinstance(thing, (type, types.ModuleType, str, bytes, int, float, type(None))):
        return []
    if isinstance(thing, Mapping):
        return list(thing.values())[:_LONGEST]
    if isinstance(thing, (list, tuple)):
        return thing[:_LONGEST]
    if isinstance(thing, types.MethodType):
        return [thing.__func__, thing.__self__]
    if isinstance(thing, functools.partial):
        return [thing.func, *thing.args, *thing.keywords.values()]
    if isinstance(thing, types.FunctionType):
        return _used_by(thing)
    if compat.is_layer(thing):
        return [*_attributes(thing), *compat.all_layers(thing), *_methods(thing)]
    if hasattr(type(thing), "python_function"):  # a tf.function
        return [thing.python_function]
    if _is_framework(type(thing)):
        return []
    return [*_attributes(thing), *_methods(thing)]


def _attributes(thing: Any) -> list[Any]:
    held = getattr(thing, "__dict__", {})
    return [held[name] for name in sorted(held)]


def _methods(thing: Any) -> list[Any]:
    """Return the functions of the class of an object, without those of a framework."""
    own = [kind for kind in type(thing).__mro__ if not _is_framework(kind)]
    found = [value for kind in own for value in vars(kind).values()]
    found += [value.fget for value in found if isinstance(value, property)]
    return [
        value
        for value in found
        if isinstance(value, types.FunctionType) or hasattr(value, "python_function")
    ]


def _used_by(function: types.FunctionType) -> list[Any]:
    wrapped = getattr(function, "__wrapped__", None)
    if _is_framework(function):
        return [] if wrapped is None else [wrapped]
    found = [wrapped, *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # not yet assigned
            found.append(cell.cell_contents)
    names = [name for name in _names(function.__code__) if name in function.__globals__]
    return [*found, *map(function.__globals__.get, names)]


def _names(code: types.CodeType) -> list[str]:
    inner = [
        name
        for const in code.co_consts
        if isinstance(const, types.CodeType)
        for name in _names(const)
    ]
    return [*code.co_names, *inner]


def _is_framework(thing: Any) -> bool:
    return str(getattr(thing, "__module__", "")).partition(".")[0] in _FRAMEWORKS
