"""What only tf-keras (Keras 2) needs: loss-scale optimizers, vocabularies among weights, legacy optimizers' slots."""

from __future__ import annotations

import sys
from typing import Any


def loss_scale_class_of_tf_keras(keras: Any, optimizer: object) -> Any:
    """Return the class of tf-keras's ``LossScaleOptimizer(optimizer)``: one for legacy optimizers, one for others.

    The exported name chooses between the two, and a subclass of it can't add methods. Can go when tf-keras has no
    legacy optimizers.
    """
    module = sys.modules[keras.mixed_precision.LossScaleOptimizer.__module__]
    legacy = isinstance(optimizer, keras.optimizers.legacy.Optimizer)
    return module.LossScaleOptimizer if legacy else module.LossScaleOptimizerV3


def is_vocabulary(weight: Any) -> bool:
    """Return True for what tf-keras lists among the weights of a layer for its vocabulary, which isn't a variable."""
    return hasattr(weight, "get_tensors") and hasattr(weight, "set_weights") and not hasattr(weight, "assign")


def layer_of_vocabulary(weight: Any) -> Any:
    """Return the layer whose vocabulary stands among the weights; None if it is something else."""
    return getattr(weight, "_layer", None)


def generator_of_layer(layer: Any) -> Any:
    """Return the ``tf.random.Generator`` from which a layer of tf-keras draws; None if there is none, or not yet."""
    return getattr(getattr(layer, "_random_generator", None), "_generator", None)


def slots(optimizer: Any, weights: Any) -> list[Any]:
    """Return the slot variables of a legacy optimizer, in the order of the weights and of the slots' names."""
    found = []
    for weight in weights:
        for name in sorted(optimizer.get_slot_names()):
            try:
                found.append(optimizer.get_slot(weight, name))
            except KeyError:  # a weight that it doesn't train
                continue
    return found


def layers_that_draw(model: Any) -> list[tuple[Any, Any]]:
    """Return the layers of a tf-keras model that draw random numbers, each with what it draws them from."""
    if not hasattr(model, "_flatten_layers"):
        return []
    pairs = [(layer, getattr(layer, "_random_generator", None)) for layer in model._flatten_layers()]
    return [(layer, generator) for layer, generator in pairs if generator is not None]


def hides_its_state(generator: Any) -> bool:
    """Return True if the random state of what a layer draws from is inside an operation, where nothing can read it."""
    return getattr(generator, "_rng_type", "") == "legacy_stateful"


COUNTERS_METHOD = "_maybe_load_initial_counters_from_ckpt"
"""The method by which a tf-keras model takes the epoch to begin with from a backup."""
