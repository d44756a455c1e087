"""What a Keras model consists of, in Keras 3 and in tf-keras: its layers, metrics, losses and moving statistics; and
its own training step without the backward pass.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Callable, cast

import tensorflow as tf
from tensorflow.python.util import dispatch

from npu_device._src.compat.keras import (
    belongs_to_keras,
    class_with,
    is_vocabulary,
    keras_of,
    of_keras_3,
    release_of,
)
from npu_device._src.compat.live_objects import live_objects, with_subclasses
from npu_device._src.compat.script_functions import call_rewritten


def all_layers(model: Any) -> list:
    """Return a model and its layers, including nested ones."""
    # Keras has no public name for this, but tf-keras 2.15 to 2.20 and Keras 3.0 to 3.15 have the private one.
    return list(model._flatten_layers())


def converted(component: Any, name: str) -> Callable:
    """Return a method of an object. AutoGraph rewrites that of a loss or metric of tf-keras in a graph, as Keras's own
    calls of it do, even if whoever calls it isn't rewritten. Keras 3 has none rewritten.
    """
    method = getattr(component, name)
    is_loss_or_metric = hasattr(component, "reduction") or hasattr(component, "update_state")
    if not is_loss_or_metric or of_keras_3(component):
        return cast(Callable, method)

    def call(*args: Any, **kwargs: Any) -> Any:
        if tf.executing_eagerly():
            return method(*args, **kwargs)
        return call_rewritten(method, *args, **kwargs)

    return call


def variables_of(model: Any) -> list:
    """Return the variables of a model, as far as they exist; tf-keras doesn't list them if a part was never called."""
    try:
        return list(model.variables)
    except ValueError:
        variables = []
        for layer in all_layers(model):
            variables += [*layer._trainable_weights, *layer._non_trainable_weights]
        return unique(variables)


def operations_of(model: Any) -> list:
    """Return the layers of a model, including itself and nested ones, and in Keras 3 what a functional model does
    between them; without metrics, which are layers in tf-keras.
    """
    layers = [layer for layer in all_layers(model) if not hasattr(layer, "update_state")]
    operations = list(layers)
    for layer in layers:
        operations += getattr(layer, "operations", ())
    return unique(operations)


def is_layer(candidate: Any) -> bool:
    return hasattr(type(candidate), "_flatten_layers")


def is_optimizer(candidate: Any) -> bool:
    return hasattr(type(candidate), "apply_gradients") and hasattr(type(candidate), "iterations")


def counters_of(model: Any) -> list:
    """Return tf-keras's own counters in a model, which are variables."""
    names = ("_train_counter", "_test_counter", "_predict_counter", "_steps_per_execution")
    counters = [vars(model).get(name) for name in names]
    return [counter for counter in counters if counter is not None]


def is_metric(candidate: Any) -> bool:
    bases = type(candidate).__mro__
    return any(base.__name__ == "Metric" and belongs_to_keras(base) for base in bases)


def metrics_in(candidate: Any) -> list:
    """Return the metrics in a container of a compiled model, or a metric itself; nothing of anything else."""
    is_container = type(candidate).__name__ in _METRIC_CONTAINERS
    if is_metric(candidate) or (is_container and belongs_to_keras(type(candidate))):
        return list(_flat(candidate))
    return []


def metrics_of(model: Any) -> list:
    """Return the metrics that Keras lists for a model; its steps may update more, see ``training_state.metrics``."""
    containers = list(model.metrics)
    for name in (
        "_loss_tracker",
        "_compile_metrics",
        "compiled_metrics",
        "_compile_loss",
        "compiled_loss",
    ):
        containers.append(getattr(model, name, None))
    return unique(itertools.chain.from_iterable(map(_flat, containers)))


def loss_trackers_of(model: Any) -> list:
    """Return the metrics to which Keras itself passes losses, with the number of samples in the batch."""
    names = ("_loss_tracker", "_compile_loss", "compiled_loss")
    trackers = [getattr(model, name, None) for name in names]
    return unique(itertools.chain.from_iterable(map(_flat, trackers)))


# Those of the compiled metrics and of the compiled losses, which have no state of their own.
_METRIC_CONTAINERS = (
    "CompileMetrics",
    "MetricsContainer",
    "CompileLoss",
    "LossesContainer",
    "MetricsList",
)


def _flat(metric: Any) -> Iterator:
    """Yield the metrics in a container, or a metric itself; nothing of anything else."""
    if type(metric).__name__ in _METRIC_CONTAINERS:
        for inner in metric.metrics or []:
            yield from _flat(inner)
    elif hasattr(metric, "update_state") and hasattr(metric, "variables"):
        yield metric


def compiled_losses(model: Any) -> list:
    """Return the loss objects of ``compile``, as far as they exist; those of functions and names, too."""
    # Keras 3 has this container: of loss objects before 3.7, of wrapped ones later.
    compiled = getattr(model, "_compile_loss", None)
    built = getattr(compiled, "_flat_losses", None) or getattr(compiled, "flat_losses", None) or []
    losses = [getattr(wrapped, "loss", wrapped) for wrapped in built]
    # In Keras 3, this name isn't a container but a method.
    container: Any = getattr(model, "compiled_loss", None)
    if getattr(container, "built", False) is True:
        losses += container._losses
    return [loss for loss in losses if hasattr(loss, "reduction")]


def is_loss_container(loss: Any) -> bool:
    return type(loss).__name__ == "CompileLoss"


def adds_loss_of_script(layer: Any) -> bool:
    """Return True for tf-keras's layer behind ``model.add_loss(tensor)`` of a functional model."""
    return type(layer).__name__ == "AddLoss" and belongs_to_keras(type(layer))


def layers_that_add_up_activity(model: Any) -> list:
    """Return the layers whose activity regularizer, of Keras's own, adds up over the samples.

    Keras 3 divides by their number from 3.14 on, as tf-keras always did. Can go with the versions before that.
    """
    layers: list = []
    if not (3, 0) <= release_of(keras_of(model)) < (3, 14):
        return layers
    for layer in all_layers(model):
        regularizer = type(getattr(layer, "activity_regularizer", None))
        if regularizer.__name__ in ("L1", "L2", "L1L2") and belongs_to_keras(regularizer):
            layers.append(layer)
    return layers


def is_built(model: Any) -> bool:
    """Return True when a compiled model has all the variables that training it needs."""
    # A subclassed model is built once build has been called, although its layers may not be.
    if not model.built or not all(getattr(layer, "built", True) for layer in model.layers):
        return False
    names = ("_compile_metrics", "compiled_metrics", "_compile_loss", "compiled_loss")
    containers = [getattr(model, name, None) for name in names]
    existing = [container for container in containers if container is not None]
    used = filter(_is_used, existing)
    return all(getattr(container, "built", True) for container in used)


def _is_used(container: Any) -> bool:
    # In a model with a custom train step, the compiled loss may exist without ever being called.
    return bool(getattr(container, "_user_loss", True)) and bool(
        getattr(container, "_user_losses", True)
    )


def moving_statistics(model: Any, metrics: Iterable) -> list:
    """Return the floating-point variables, such as moving averages, that layers update themselves in training; without
    those of metrics.
    """
    layers = all_layers(model)
    # In tf-keras metrics are layers, and layers list the variables of their metrics.
    excluded_layers = [
        layer for layer in layers if not layer.trainable or hasattr(layer, "update_state")
    ]
    excluded = {id(state) for state in states_of_samples(model)}
    for layer in [*excluded_layers, *metrics]:
        excluded.update(map(id, variables_of(layer)))
    updated = []
    for layer in layers:
        if layer.trainable:
            updated += _not_trained(layer)
    variables = []
    for variable in unique(updated):
        if id(variable) not in excluded and not is_vocabulary(variable):
            variables.append(variable)
    return [variable for variable in variables if tf.as_dtype(variable.dtype).is_floating]


def states_of_samples(model: Any) -> list:
    """Return the variables of recurrent layers with ``stateful=True``, which have a row for each sample of a batch."""
    layers = []
    for layer in all_layers(model):
        if getattr(layer, "stateful", False) and hasattr(layer, "cell"):
            layers.append(layer)
    states = []
    for layer in layers:
        states += tf.nest.flatten(getattr(layer, "states", None))
    return [state for state in states if hasattr(state, "assign")]


def _not_trained(layer: Any) -> list:
    try:
        return list(layer.non_trainable_weights)
    except ValueError:
        # A tf-keras model raises this if a part was never called; its layers are asked, too.
        return []


def steps_per_call(model: Any) -> int:
    """Return how many batches a function of the model takes at a time (``steps_per_execution``), now."""
    # In tf-keras this is a variable, which is set lower at the end of an epoch.
    steps = getattr(model, "_steps_per_execution", None)
    if steps is None:
        steps = getattr(model, "steps_per_execution", 1)
    if steps is None:
        return 1
    return int(steps)


def run_training_forward_pass(model: Any, batch: Any) -> None:
    """Do what Keras's own ``train_step`` does, with the same arguments, but for the gradients and the optimizer."""
    x, y, sample_weight = keras_of(model).utils.unpack_x_y_sample_weight(batch)
    y_pred = _forward(model, x)
    # Keras 3.3 and later call this method in ``Model.train_step``, and all others the public one.
    if of_keras_3(model) and hasattr(model, "_compute_loss"):
        model._compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=True)
    else:
        model.compute_loss(x, y, y_pred, sample_weight)
    model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)


def _forward(model: Any, x: Any) -> Any:
    # Only Keras 3 looks whether the model takes the argument.
    if getattr(model, "_call_has_training_arg", True):
        return model(x, training=True)
    return model(x)


def unique(objects: Iterable) -> list:
    """Return objects once each, in their order; variables have no hash, or compare elements."""
    return list({id(instance): instance for instance in objects}.values())


# The name of the method in tf-keras, and that in Keras 3.
_MOMENTS_METHODS = ("_sync_calculate_mean_and_var", "_moments")


def moments_method(layer: Any) -> str:
    """Return the name of the method that gives a synchronized layer its mean and variance."""
    of_tf_keras, of_keras_3 = _MOMENTS_METHODS
    if hasattr(layer, of_tf_keras):
        return of_tf_keras
    return of_keras_3


def is_batch_normalization(layer: Any) -> bool:
    return isinstance(layer, tuple(_batch_normalizations()))


def batch_normalizations() -> list:
    """Return the batch normalizations that exist in this process, of either Keras."""
    classes = set(with_subclasses(_batch_normalizations()))
    # The search takes long, and finds nothing if no Keras is imported.
    if not classes:
        return []
    return live_objects(classes)


def normalization_at_work() -> tuple[Any, Any] | None:
    """Return the batch normalization that computes mean and variance in this thread, with its inputs; None if none."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name in _MOMENTS_METHODS:
            layer, inputs = (frame.f_locals.get(name) for name in code.co_varnames[:2])
            if is_batch_normalization(layer):
                return layer, inputs
        frame = frame.f_back
    return None


def called_normalizations() -> list:
    """Return the batch normalization whose ``call`` is the innermost one in this thread, in a list; or an empty one."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "call":
        frame = frame.f_back
    # Variables are cast often, and the names of a frame are costly.
    if frame is None or not _is_normalization_module(frame.f_globals):
        return []
    return [frame.f_locals.get("self")]


def note_casts_of_keras_variables(note: Callable[[], None]) -> Callable[[], None] | None:
    """Have ``note`` called before each ``tf.cast`` of a variable of Keras 3, in any thread and graph.

    Returns the function that ends this; None if Keras 3 isn't imported.
    """
    variable_class = getattr(sys.modules.get("keras"), "Variable", None)
    if variable_class is None:
        return None

    def cast(x: Any, dtype: Any, name: str | None = None) -> Any:
        note()
        return tf.cast(tf.convert_to_tensor(x), dtype, name)

    # TensorFlow looks for functions of registered types only. A second registration is an error, and none can end.
    with contextlib.suppress(ValueError):
        dispatch.register_dispatchable_type(variable_class)
    tf.experimental.dispatch_for_api(tf.cast, {"x": variable_class})(cast)
    return functools.partial(tf.experimental.unregister_dispatch_for, cast)


def _is_normalization_module(module_globals: Mapping[str, Any]) -> bool:
    return str(module_globals.get("__name__")).endswith("normalization.batch_normalization")


def _batch_normalizations() -> list:
    """Return the class of each imported Keras that computes moments."""
    classes = []
    for name in ("keras", "tf_keras"):
        layers = getattr(sys.modules.get(name), "layers", None)
        exported = getattr(layers, "BatchNormalization", None)
        # A Keras that is just being imported lacks the class.
        if exported is not None:
            classes.append(class_with(exported, moments_method(exported)))
    return classes


def reduction_axes(layer: Any) -> Any:
    return layer._reduction_axes


def learning_rate_of(optimizer: Any) -> Any:
    """Return the learning rate of an optimizer, or its schedule if it has one; the public name gives its value now."""
    rate = getattr(optimizer, "_learning_rate", None)
    # A schedule has a configuration, and can't be assigned.
    if hasattr(rate, "get_config") and not hasattr(rate, "assign"):
        return rate
    # A legacy optimizer may return a schedule here, too.
    return optimizer.learning_rate


def function_of_metric(metric: Any) -> Any:
    """Return the function whose results a metric averages; None if it isn't of that kind."""
    return getattr(metric, "_fn", None)


def values_of_metric(metric: Any, y_true: Any, y_pred: Any) -> Any:
    """Return what the function of a metric gives for labels and predictions."""
    return metric._fn(y_true, y_pred, **metric._fn_kwargs)
