"""Queries of a Keras model, in Keras 3 and in tf-keras: its metrics, losses and variables.

Some of these have no public name in Keras.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from npu_device._src import compat
from npu_device._src.training.training_state import attributes, unique


def metrics_of(model: Any) -> list[Any]:
    """Return the metrics of a model that have variables of their own, each once."""
    compiled = [getattr(model, name, None) for name in ("_loss_tracker", "_compile_metrics", "compiled_metrics")]
    losses = [getattr(model, name, None) for name in ("_compile_loss", "compiled_loss")]
    return unique(part for metric in [*model.metrics, *compiled, *losses] for part in _flat(metric))


def _flat(metric: Any) -> Iterator[Any]:
    # The containers of the compiled metrics and of the compiled losses have no state of their own.
    if type(metric).__name__ in ("CompileMetrics", "MetricsContainer", "CompileLoss", "LossesContainer", "MetricsList"):
        for part in metric.metrics or []:
            yield from _flat(part)
    elif hasattr(metric, "update_state") and hasattr(metric, "variables"):
        yield metric


def losses_of(model: Any) -> list[Any]:
    """Return the loss objects of a model that reduce: the compiled ones, and those among its attributes, each once."""
    built = getattr(getattr(model, "_compile_loss", None), "_flat_losses", None)  # Keras 3
    losses = [entry.loss for entry in built or []]
    container: Any = getattr(model, "compiled_loss", None)  # tf-keras; in Keras 3 a method
    if getattr(container, "built", False) is True:
        losses += [loss for loss in container._losses if hasattr(loss, "reduction")]
    base = compat.keras_of(model).losses.Loss
    own = [value for value in attributes(model) if isinstance(value, base) and not hasattr(value, "_flat_losses")]
    # Without a reduction, the script reduces what an attribute gives; most take means, which need no change.
    losses += [loss for loss in own if loss.reduction not in ("none", None)]
    return unique(losses)


def is_built(model: Any) -> bool:
    """Return True when a compiled model has all the variables that training it needs."""
    if not model.built or not all(getattr(layer, "built", True) for layer in model.layers):
        return False
    parts = [getattr(model, name, None) for name in ("_compile_metrics", "compiled_metrics")]
    parts += [getattr(model, name, None) for name in ("_compile_loss", "compiled_loss")]
    return all(getattr(part, "built", True) for part in parts if part is not None and _is_used(part))


def _is_used(part: Any) -> bool:
    # In a model with a custom train step, the compiled loss may exist without ever being called.
    return bool(getattr(part, "_user_loss", True)) and bool(getattr(part, "_user_losses", True))


def moving_statistics(model: Any) -> list[Any]:
    """Return the floating-point variables, such as moving averages, that layers update themselves in training."""
    layers = list(model._flatten_layers())
    # In tf-keras metrics are layers, too.
    others = [layer for layer in layers if not layer.trainable or hasattr(layer, "update_state")]
    frozen = {id(variable) for layer in [*others, *metrics_of(model)] for variable in layer.variables}
    updated = unique(variable for layer in layers if layer.trainable for variable in layer.non_trainable_weights)
    variables = [each for each in updated if id(each) not in frozen and not compat.is_vocabulary(each)]
    return [variable for variable in variables if tf.as_dtype(variable.dtype).is_floating]


def steps_per_call(model: Any) -> int:
    """Return how many batches a function of the model takes at a time (``steps_per_execution``), now."""
    current = getattr(model, "_steps_per_execution", None)  # tf-keras: a variable, less at the end of an epoch
    if current is None:
        current = getattr(model, "steps_per_execution", 1)
    return int(current) if current is not None else 1
