"""Before a replicated model's first step of a call: make its variables, equal to rank 0's, and compare the data."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import tensorflow as tf

from npu_device._src import compat
from npu_device._src.training import layer_state, training_state
from npu_device._src.training.fit import keras_models
from npu_device._src.training.same_variables import checksum, not_yet
from npu_device._src.training.world import World


def share_random_state(world: World) -> None:
    """Set every rank's random states to those of rank 0: Python's, numpy's and TensorFlow's.

    If TensorFlow has no seed, one is set, so that Keras shuffles in the same order on all ranks.
    """
    if world.is_main and compat.random_state()[0] is None:
        tf.random.set_seed(random.SystemRandom().randrange(1 << 31))
    mine = (random.getstate(), np.random.get_state(), compat.random_state())
    python, numpy, tensorflow = world.object_from_root(mine)
    if not world.is_main:
        random.setstate(python)
        np.random.set_state(numpy)
        if mine[2] != tensorflow:
            compat.set_random_state(tensorflow)


def build(model: Any, kind: str, batch: Any) -> None:
    """Make all variables that a step of a given kind needs; nothing is computed.

    Args:
        model: the model.
        kind: ``"train"``, ``"test"`` or ``"predict"``.
        batch: one batch.
    """
    if kind == "predict":
        if not model.built:
            _trace(model, "predict_step", batch)
        return
    if kind == "train" and not compat.belongs_to_keras(type(model).train_step):
        _trace(model, "train_step", batch)  # which may create anything
        return
    if not keras_models.is_built(model):
        _trace(model, "test_step", batch)  # makes the same variables as training, at a third of the cost
    if kind == "train":
        training_state.build_optimizer(model)


def _trace(model: Any, step: str, batch: Any) -> None:
    method = getattr(type(model), step)
    with not_yet():
        tf.function(lambda data: method(model, data)).get_concrete_function(tf.nest.map_structure(_spec, batch))


def _spec(leaf: Any) -> Any:
    if leaf is None:
        return None
    spec = tf.type_spec_from_value(leaf)
    if isinstance(spec, tf.TensorSpec) and spec.shape.rank:
        return tf.TensorSpec([None, *spec.shape[1:]], spec.dtype)
    return spec


def synchronise(world: World, model: Any, training: bool, root_rank: int = 0) -> None:
    """Send the root's model variables to every rank, and those of its optimizers if it trains.

    Raises:
        ValueError: what layers hold outside variables isn't the same on all ranks.
    """
    # An eager model's layers may keep tensors of their last call, which are of the rank's share.
    constants = not getattr(model, "run_eagerly", False)
    layer_state.require_same(world, [model, *compat.layers_of(model)], constants)
    variables = [variable for variable in model.variables if not compat.is_vocabulary(variable)]
    if training:
        variables += training_state.optimizer_state(model)
    each = [variable for variable in training_state.unique(variables) if tf.as_dtype(variable.dtype) != tf.string]
    world.assign_from_root(each, root_rank)


def digest(batch: Any) -> int:
    """Return a checksum of a batch."""
    found = 0
    for leaf in tf.nest.flatten(batch, expand_composites=True):
        if leaf is not None and getattr(leaf, "dtype", None) not in (tf.variant, tf.resource):
            found = checksum(leaf, found)
    return found
