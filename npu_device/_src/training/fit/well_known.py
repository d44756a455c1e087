"""Tells which models need no first-step check: Keras's own layers, loss and step treat samples one by one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import tensorflow as tf

from npu_device._src import compat
from npu_device._src.training.fit.share import lengths_of

if TYPE_CHECKING:
    from npu_device._src.training.fit.function import Function

_LOSSES = {
    "binarycrossentropy", "binaryfocalcrossentropy", "categoricalcrossentropy", "categoricalfocalcrossentropy",
    "categoricalhinge", "cosinesimilarity", "hinge", "huber", "kldivergence", "logcosh", "meanabsoluteerror",
    "meanabsolutepercentageerror", "meansquarederror", "meansquaredlogarithmicerror", "poisson",
    "sparsecategoricalcrossentropy", "squaredhinge",
}  # fmt: skip
"""Those that have one value for each sample. Dice, Tversky and CircleLoss, for instance, compare the samples."""

_ANYTHING = ("Lambda", "TFOpLambda", "SlicingOpLambda", "ClassMethod", "InstanceMethod", "InstanceProperty", "AddLoss")
"""Layers of Keras that hold anything that the user has written."""


def needs_no_check(function: Function, batch: Any) -> bool:
    """Return True for a functional model of Keras's own layers with a built-in loss and dense inputs of one length."""
    losses = function.parts.losses
    return (
        not function.is_scripts
        and compat.belongs_to_keras(type(function.model))
        and bool(losses)
        and all(map(_is_well_known_loss, losses))
        and all(map(_treats_samples_apart, compat.operations_of(function.model)))
        and len({int(length) for length in lengths_of(batch)}) == 1
        and not any(isinstance(leaf, tf.RaggedTensor) for leaf in tf.nest.flatten(batch))
    )


def _is_well_known_loss(loss: Any) -> bool:
    function = getattr(loss, "fn", None)
    thing = type(loss) if function is None else function
    name = getattr(thing, "__name__", "").lower().replace("_", "")
    return compat.belongs_to_keras(type(loss)) and compat.belongs_to_keras(thing) and name in _LOSSES


def _treats_samples_apart(layer: Any) -> bool:
    axis = getattr(layer, "axis", None)
    axes = axis if isinstance(axis, (list, tuple)) else [axis]
    activation = getattr(layer, "activation", None)
    return (
        compat.is_layer(layer)
        and compat.belongs_to_keras(type(layer))
        and type(layer).__name__ not in _ANYTHING
        and 0 not in axes
        and (activation is None or compat.belongs_to_keras(activation))
        and getattr(layer, "activity_regularizer", None) is None
    )
