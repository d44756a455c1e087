"""The objects of a model that its step uses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from npu_device._src import compat
from npu_device._src.training.watching import training_state


@dataclass(frozen=True)
class ModelObjects:
    """Found before the first step."""

    metrics: list  # metrics that have variables of their own, and that a step can reach
    trackers: list  # the metrics to which Keras itself passes losses
    losses: list  # losses that reduce: the compiled ones, and others that a step can reach
    layers: list  # all layers, and the model itself
    regularized: list  # layers whose activity regularizer is a sum over the samples
    # Floating-point variables that the step moves, but no optimizer, such as moving averages.
    statistics: list
    generators: list  # generators from which the step draws random numbers


def generators_of(model: Any) -> list:
    """Return the generators that a model's step draws from: among its layers and attributes, and of the process."""
    candidates = [compat.random_generator_of_process(), compat.seed_generator_of_keras_3()]
    for layer in compat.all_layers(model):
        candidates += [compat.generator_of_layer(layer), *training_state.attributes(layer)]
    return compat.unique(filter(compat.is_generator, candidates))


def objects_of(model: Any) -> ModelObjects:
    """Return the objects of a model that has been built."""
    loss_class = compat.keras_of(model).losses.Loss
    # Without a reduction, the script reduces what a loss gives; most take means, which need no change.
    losses = []
    for loss in training_state.reachable(model):
        is_single = isinstance(loss, loss_class) and not compat.is_loss_container(loss)
        if is_single and loss.reduction not in ("none", None):
            losses.append(loss)
    loose = training_state.loose_variables(model)
    losses = [*compat.compiled_losses(model), *losses]
    metrics = training_state.metrics(model)
    statistics = compat.moving_statistics(model, metrics)
    statistics += [variable for variable in loose if variable.dtype.is_floating]
    return ModelObjects(
        metrics,
        compat.loss_trackers_of(model),
        compat.unique(losses),
        compat.all_layers(model),
        compat.layers_that_add_up_activity(model),
        compat.unique(statistics),
        generators_of(model),
    )
