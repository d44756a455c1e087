"""What a Keras model consists of, in Keras 3 and in tf-keras: its layers, metrics, losses and moving statistics; and
its own training step without the backward pass.
"""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Iterable, Iterator
from typing import Any, Callable, cast

import tensorflow as tf
from tensorflow.python.autograph.core import ag_ctx

from npu_device._src.compat.keras import belongs_to_keras, is_keras_3, is_vocabulary, keras_of


def all_layers(model: Any) -> list[Any]:
    """Return a model and its layers, including nested ones."""
    return list(model._flatten_layers())  # in tf-keras 2.15 to 2.20, and Keras 3.0 to 3.15


def converted(thing: Any, name: str) -> Callable[..., Any]:
    """Return a method of an object. AutoGraph rewrites that of a loss or metric of tf-keras in a graph, as Keras's own
    calls of it do, even if whoever calls it isn't rewritten. Keras 3 has none rewritten.
    """
    method = getattr(thing, name)
    if not (hasattr(thing, "reduction") or hasattr(thing, "update_state")) or is_keras_3(keras_of(thing)):
        return cast(Callable[..., Any], method)

    def call(*args: Any, **kwargs: Any) -> Any:
        if tf.executing_eagerly():
            return method(*args, **kwargs)
        with ag_ctx.ControlStatusCtx(status=ag_ctx.Status.ENABLED) as status:
            return tf.__internal__.autograph.tf_convert(method, status)(*args, **kwargs)

    return call


def variables_of(model: Any) -> list[Any]:
    """Return the variables of a model, as far as they exist; tf-keras doesn't list them if a part was never called."""
    try:
        return list(model.variables)
    except ValueError:
        own = [[*layer._trainable_weights, *layer._non_trainable_weights] for layer in all_layers(model)]
        return _unique(variable for variables in own for variable in variables)


def operations_of(model: Any) -> list[Any]:
    """Return the layers of a model, including itself and nested ones, and in Keras 3 what a functional model does
    between them; without metrics, which are layers in tf-keras.
    """
    layers = [layer for layer in all_layers(model) if not hasattr(layer, "update_state")]
    return _unique([*layers, *(operation for layer in layers for operation in getattr(layer, "operations", ()))])


def is_layer(thing: Any) -> bool:
    return hasattr(type(thing), "_flatten_layers")


def is_optimizer(thing: Any) -> bool:
    return hasattr(type(thing), "apply_gradients") and hasattr(type(thing), "iterations")


def counters_of(model: Any) -> list[Any]:
    """Return tf-keras's own counters in a model, which are variables."""
    names = ("_train_counter", "_test_counter", "_predict_counter", "_steps_per_execution")
    return [vars(model)[name] for name in names if vars(model).get(name) is not None]


def metrics_of(model: Any) -> list[Any]:
    compiled = [getattr(model, name, None) for name in ("_loss_tracker", "_compile_metrics", "compiled_metrics")]
    losses = [getattr(model, name, None) for name in ("_compile_loss", "compiled_loss")]
    return _unique(part for metric in [*model.metrics, *compiled, *losses] for part in _flat(metric))


def loss_trackers_of(model: Any) -> list[Any]:
    """Return the metrics to which Keras itself passes losses, with the number of samples in the batch."""
    parts = [getattr(model, name, None) for name in ("_loss_tracker", "_compile_loss", "compiled_loss")]
    return _unique(part for metric in parts for part in _flat(metric))


def _flat(metric: Any) -> Iterator[Any]:
    # The containers of the compiled metrics and of the compiled losses have no state of their own.
    if type(metric).__name__ in ("CompileMetrics", "MetricsContainer", "CompileLoss", "LossesContainer", "MetricsList"):
        for part in metric.metrics or []:
            yield from _flat(part)
    elif hasattr(metric, "update_state") and hasattr(metric, "variables"):
        yield metric


def compiled_losses(model: Any) -> list[Any]:
    """Return the loss objects of ``compile``, as far as they exist; those of functions and names, too."""
    compiled = getattr(model, "_compile_loss", None)  # Keras 3; before 3.7 with the objects themselves
    built = getattr(compiled, "_flat_losses", None) or getattr(compiled, "flat_losses", None) or []
    losses = [loss for loss in (getattr(entry, "loss", entry) for entry in built) if hasattr(loss, "reduction")]
    container: Any = getattr(model, "compiled_loss", None)  # tf-keras; in Keras 3 a method
    if getattr(container, "built", False) is True:
        losses += [loss for loss in container._losses if hasattr(loss, "reduction")]
    return losses


def is_loss_container(loss: Any) -> bool:
    return type(loss).__name__ == "CompileLoss"


def adds_loss_of_script(layer: Any) -> bool:
    """Return True for tf-keras's layer behind ``model.add_loss(tensor)`` of a functional model."""
    return type(layer).__name__ == "AddLoss" and belongs_to_keras(type(layer))


def layers_that_add_up_activity(model: Any) -> list[Any]:
    """Return the layers whose activity regularizer, of Keras's own, adds up over the samples.

    Keras 3 divides by their number from 3.14 on, as tf-keras always did. Can go with the versions before that.
    """
    kinds = [(layer, type(getattr(layer, "activity_regularizer", None))) for layer in all_layers(model)]
    found = [each for each, kind in kinds if kind.__name__ in ("L1", "L2", "L1L2") and belongs_to_keras(kind)]
    return found if found and _adds_up_activity(keras_of(model)) else []


@functools.cache
def _adds_up_activity(keras: Any) -> bool:
    with tf.init_scope():
        layer = keras.layers.Activation("linear", activity_regularizer=keras.regularizers.L1(1.0), name="npu_device")
        layer(tf.ones([2, 1]))
        return float(layer.losses[0]) > 1.5


def is_built(model: Any) -> bool:
    """Return True when a compiled model has all the variables that training it needs."""
    if not model.built or not all(getattr(layer, "built", True) for layer in model.layers):
        return False
    names = ("_compile_metrics", "compiled_metrics", "_compile_loss", "compiled_loss")
    parts = [getattr(model, name, None) for name in names]
    return all(getattr(part, "built", True) for part in parts if part is not None and _is_used(part))


def _is_used(part: Any) -> bool:
    # In a model with a custom train step, the compiled loss may exist without ever being called.
    return bool(getattr(part, "_user_loss", True)) and bool(getattr(part, "_user_losses", True))


def moving_statistics(model: Any) -> list[Any]:
    """Return the floating-point variables, such as moving averages, that layers update themselves in training."""
    layers = all_layers(model)
    # In tf-keras metrics are layers, too.
    others = [layer for layer in layers if not layer.trainable or hasattr(layer, "update_state")]
    frozen = {id(variable) for layer in [*others, *metrics_of(model)] for variable in variables_of(layer)}
    frozen |= set(map(id, states_of_samples(model)))
    updated = _unique(variable for layer in layers if layer.trainable for variable in _not_trained(layer))
    variables = [each for each in updated if id(each) not in frozen and not is_vocabulary(each)]
    return [variable for variable in variables if tf.as_dtype(variable.dtype).is_floating]


def states_of_samples(model: Any) -> list[Any]:
    """Return the variables of recurrent layers with ``stateful=True``, which have a row for each sample of a batch."""
    layers = [layer for layer in all_layers(model) if getattr(layer, "stateful", False) and hasattr(layer, "cell")]
    states = [tf.nest.flatten(getattr(layer, "states", None)) for layer in layers]
    return [state for of_layer in states for state in of_layer if hasattr(state, "assign")]


def _not_trained(layer: Any) -> list[Any]:
    try:
        return list(layer.non_trainable_weights)
    except ValueError:  # a part was never called (tf-keras); its layers are asked, too
        return []


def steps_per_call(model: Any) -> int:
    """Return how many batches a function of the model takes at a time (``steps_per_execution``), now."""
    current = getattr(model, "_steps_per_execution", None)  # tf-keras: a variable, less at the end of an epoch
    if current is None:
        current = getattr(model, "steps_per_execution", 1)
    return int(current) if current is not None else 1


def forward_of_training(model: Any, data: Any) -> None:
    """Do what Keras's own ``train_step`` does, with the same arguments, but for the gradients and the optimizer."""
    keras = keras_of(model)
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
    if not is_keras_3(keras):
        y_pred = model(x, training=True)
        model.compute_loss(x, y, y_pred, sample_weight)
    else:
        y_pred = model(x, training=True) if getattr(model, "_call_has_training_arg", True) else model(x)
        if hasattr(model, "_compute_loss"):  # from Keras 3.3 on
            model._compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=True)
        else:
            model.compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight)
    model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)


def _unique(things: Iterable[Any]) -> list[Any]:
    return list({id(thing): thing for thing in things}.values())


def moments_method(layer: Any) -> str:
    """Return the name of the method that gives a synchronized layer its mean and variance."""
    return "_sync_calculate_mean_and_var" if hasattr(layer, "_sync_calculate_mean_and_var") else "_moments"


def is_batch_normalization(layer: Any) -> bool:
    return any(isinstance(layer, kind) for kind in _batch_normalizations())


def batch_normalizations() -> list[Any]:
    """Return the batch normalizations that exist in this process, of either Keras."""
    kinds = set(_with_subclasses(_batch_normalizations()))
    # By their type alone: an attribute of any object could be computed, such as that of a module that loads late.
    return [thing for thing in gc.get_objects() if type(thing) in kinds] if kinds else []


def objects_at_work() -> Iterator[Any]:
    """Yield the objects whose methods are running, the innermost first."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if "self" in frame.f_locals:
            yield frame.f_locals["self"]
        frame = frame.f_back


def _batch_normalizations() -> list[Any]:
    """Return the class of each imported Keras that computes moments."""
    layers = [getattr(sys.modules.get(name), "layers", None) for name in ("keras", "tf_keras")]
    kinds = [kind for kind in (getattr(each, "BatchNormalization", None) for each in layers) if kind is not None]
    return [next(each for each in kind.__mro__ if moments_method(kind) in vars(each)) for kind in kinds]


def _with_subclasses(kinds: Iterable[Any]) -> Iterator[Any]:
    for kind in kinds:
        yield kind
        yield from _with_subclasses(kind.__subclasses__())


def reduction_axes(layer: Any) -> Any:
    return layer._reduction_axes


def learning_rate_of(optimizer: Any) -> Any:
    """Return the learning rate of an optimizer, or its schedule if it has one; the public name gives its value now."""
    rate = getattr(optimizer, "_learning_rate", None)
    is_schedule = hasattr(rate, "get_config") and not hasattr(rate, "assign")
    return rate if is_schedule else optimizer.learning_rate  # of a legacy optimizer, this may be a schedule as well


def function_of_metric(metric: Any) -> Any:
    """Return the function whose results a metric averages; None if it isn't of that kind."""
    return getattr(metric, "_fn", None)
