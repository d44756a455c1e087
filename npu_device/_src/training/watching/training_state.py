"""The variables that training a Keras model changes: its weights, and the state of its optimizers.

They are listed in an order that doesn't depend on when they were created, and may be created before the first step.
"""

from __future__ import annotations

import contextlib
import functools
import random
import types
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Callable

import numpy as np
import tensorflow as tf

from npu_device._src import compat
from npu_device._src.training.watching.schedule import only_building


def training_variables(model: Any) -> list:
    """Return the weights and the state of the optimizers, as far as they exist, in the same order on every rank."""
    return compat.unique([*weights(model), *optimizer_state(model)])


def weights(model: Any) -> list:
    """Return the weights of the model, as far as they exist."""
    try:
        variables = model.weights
    except ValueError:
        # A part of a tf-keras model isn't built.
        variables = compat.variables_of(model)
    return compat.unique(weight for weight in variables if not compat.is_vocabulary(weight))


def optimizer_state(model: Any) -> list:
    """Return the variables of the model's optimizers: steps, slots, averages, learning rates and loss scales."""
    states = []
    for optimizer in optimizers(model):
        states += compat.optimizer_variables(optimizer, weights(model))
    return compat.unique(states)


def optimizers(model: Any) -> list:
    """Return the optimizers that the steps of a model can reach: a GAN has two, and parts of it may have their own."""
    return [node for node in reachable(model) if compat.is_optimizer(node)]


def metrics(model: Any) -> list:
    """Return the metrics that the steps of a model can reach: first what Keras lists, then any others.

    Keras doesn't list what a ``metrics`` property leaves out, what nested models have in Keras 3, and what isn't an
    attribute. A metric inside another one is left out: the outer metric updates it.
    """
    found = compat.metrics_of(model)
    for node in reachable(model, in_metrics=False):
        found += compat.metrics_in(node)
    return compat.unique(found)


def loose_variables(model: Any) -> list:
    """Return the ``tf.Variable`` objects that the steps can reach, but that Keras doesn't count among its variables."""
    of_metrics = [variable for metric in metrics(model) for variable in metric.variables]
    variables = [*compat.variables_of(model), *of_metrics, *compat.counters_of(model)]
    known_ids = set(map(id, [*variables, *compat.states_of_samples(model)]))
    loose = []
    for node in reachable(model):
        if isinstance(node, tf.Variable) and id(node) not in known_ids:
            loose.append(node)
    return loose


def common(model: Any, variables: Iterable) -> list:
    """Return variables of a model without those that hold a state for each sample, of which each rank has its own."""
    rank_states = set(map(id, compat.states_of_samples(model)))
    return [variable for variable in variables if id(variable) not in rank_states]


def attributes(model: Any) -> Iterable:
    """Return the attributes of the model, and what lists and dicts among them contain."""
    for value in _attributes(model):
        if isinstance(value, dict):
            yield from value.values()
        elif isinstance(value, (list, tuple)):
            yield from value
        else:
            yield value


def has_all_layers_built(model: Any) -> bool:
    return all(layer.built for layer in compat.all_layers(model)[1:])


def uses_keras_step(model: Any) -> bool:
    """Return True when ``fit`` uses Keras's own step, which updates the trainable variables with one optimizer."""
    return "train_step" not in vars(model) and compat.belongs_to_keras(type(model).train_step)


def build_optimizer(model: Any) -> None:
    """Make the optimizer state of a built model, for the step of Keras. Existing state stays as it is."""
    if getattr(model, "optimizer", None) is not None:
        compat.build_optimizer(model.optimizer, model.trainable_variables)


def trace_step(model: Any, step: Callable[[Any], Any], batch_spec: Any) -> Any:
    """Make all variables that a step of a model makes by tracing it with a ``tf.TypeSpec``; nothing is computed.

    Returns the types of what the step returns.
    """
    # AutoGraph is on where Keras itself traces the step with it.
    autograph = not compat.of_keras_3(model)
    own_traces = compat.do_not_convert(compat.own_traces)

    def traced(batch: Any) -> Any:
        # Traces that reduce nothing are for no other caller.
        with own_traces():
            return step(batch)

    with only_building.on():
        concrete = tf.function(traced, autograph=autograph).get_concrete_function(batch_spec)
    return concrete.structured_outputs


def call_on(model: Any, batch: Any) -> None:
    """Build a model that runs eagerly by calling it on a batch, and its optimizer for Keras's own step."""
    try:
        if isinstance(batch, tuple):
            batch = batch[0]
        model(batch)
    except Exception as error:
        raise RuntimeError(
            "the root can't send weights before the first step: the model is not built, and calling it on its "
            f"first batch fails ({type(error).__name__}: {error}).\n"
            "What to do: build the model before fit, on every rank, or compile it without run_eagerly=True."
        ) from error
    if uses_keras_step(model):
        build_optimizer(model)


def random_states() -> tuple[Any, ...]:
    """Return the random states of Python, numpy, TensorFlow and Keras 3."""
    states = random.getstate(), np.random.get_state(), compat.random_state()
    return (*states, compat.seed_state_of_keras_3())


def set_random_states(states: tuple[Any, ...]) -> None:
    """Set what ``random_states`` returned; older checkpoints lack the state of Keras."""
    python, numpy, tensorflow, *keras = states
    # Before Python's, from which the first draw of Keras takes a number.
    if keras and keras[0] is not None:
        compat.set_seed_state_of_keras_3(keras[0])
    random.setstate(python)
    np.random.set_state(numpy)
    # Setting it starts the state anew, also of operations that have begun to draw.
    if compat.random_state() != tensorflow:
        compat.set_random_state(tensorflow)


_FRAMEWORKS = "keras tf_keras tensorflow numpy npu_device builtins logging threading wrapt"
_LONGEST = 1000  # elements of a list or dict that are looked at: optimizers and variables aren't kept by the thousand


def reachable(model: Any, in_metrics: bool = True) -> Iterator:
    """Yield a model and what it reaches, each once, in the same order on every rank.

    That are attributes of it and of its layers; what is in lists, dicts and objects of the user's own classes; and what
    the user's functions use: closures, defaults, globals. Other objects of TensorFlow and Keras aren't looked into, nor
    any metrics without ``in_metrics``.
    """
    waiting = deque([model])
    visited = {}
    while waiting:
        node = waiting.popleft()
        if id(node) not in visited:
            # Kept, or another object could get its id.
            visited[id(node)] = node
            yield node
            if in_metrics or not compat.is_metric(node):
                waiting.extend(_contents(node))


def _contents(node: Any) -> Iterable:
    if isinstance(node, (type, types.ModuleType, str, bytes, int, float, type(None))):
        return []
    if isinstance(node, Mapping):
        return list(node.values())[:_LONGEST]
    if isinstance(node, (list, tuple)):
        return node[:_LONGEST]
    if isinstance(node, types.MethodType):
        return [node.__func__, node.__self__]
    if isinstance(node, functools.partial):
        return [node.func, *node.args, *node.keywords.values()]
    if isinstance(node, types.FunctionType):
        return _used_by(node)
    if compat.is_layer(node):
        return [*_attributes(node), *compat.all_layers(node), *_methods(node)]
    # A ``tf.function`` has this attribute on its class.
    if hasattr(type(node), "python_function"):
        return [node.python_function]
    if _is_framework(type(node)):
        return []
    return [*_attributes(node), *_methods(node)]


def _attributes(node: Any) -> list:
    attributes = getattr(node, "__dict__", {})
    # Sorted, since a script may set them in another order on each rank.
    return [attributes[name] for name in sorted(attributes)]


def _methods(node: Any) -> list:
    """Return the functions of the class of an object, without those of a framework."""
    attributes: list = []
    for owner in type(node).__mro__:
        if not _is_framework(owner):
            attributes += vars(owner).values()
    attributes += [attribute.fget for attribute in attributes if isinstance(attribute, property)]
    functions = []
    for attribute in attributes:
        if isinstance(attribute, types.FunctionType) or hasattr(attribute, "python_function"):
            functions.append(attribute)
    return functions


def _used_by(function: types.FunctionType) -> list:
    wrapped = getattr(function, "__wrapped__", None)
    if _is_framework(function):
        if wrapped is None:
            return []
        return [wrapped]
    nodes = [wrapped, *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    for cell in function.__closure__ or ():
        # A cell may not be assigned yet.
        with contextlib.suppress(ValueError):
            nodes.append(cell.cell_contents)
    names = [name for name in _names(function.__code__) if name in function.__globals__]
    return [*nodes, *map(function.__globals__.get, names)]


def _names(code: types.CodeType) -> list[str]:
    names = list(code.co_names)
    # Inner functions have code of their own, which names globals, too.
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            names += _names(const)
    return names


def _is_framework(node: Any) -> bool:
    return str(getattr(node, "__module__", "")).partition(".")[0] in _FRAMEWORKS.split()
