"""The layers of Keras with ``synchronized=True`` in loops of the script: how they get to normalize over all ranks.

A loop tells that all ranks train its model when it wraps the optimizer or broadcasts variables. The layers that exist
then are looked for in memory, and get a method on the object. Later layers are found in their first call, in any
thread: those of Keras 3 cast their moving mean first, for which TensorFlow lets us register a function (since Keras
3.5; before, a layer with a mask isn't found); the others ask TensorFlow's replica context for their sums, which is one
object for all threads and graphs.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable
from types import MethodType
from typing import Any

import tensorflow as tf

from npu_device._src import compat
from npu_device._src.collectives import job as jobs
from npu_device._src.collectives.dtypes import sum_dtype
from npu_device._src.collectives.group import WORLD_GROUP
from npu_device._src.gradients.reduction import dense_of
from npu_device._src.training.distribute.normalization import (
    Loops,
    exchange_of_layer,
    moments_of_all_ranks,
    sum_factor,
)
from npu_device._src.training.watching.schedule import can_compare
from npu_device._src.world.current_step import current_step
from npu_device._src.world.world import World

_log = logging.getLogger("npu_device")
_as_it_is = compat.do_not_convert

_GROUP = "_npu_normalizes_over"  # the attribute of a layer that got a method: the name of its group
_CHECKS = 16  # kinds of reductions at which layers are looked for
_SEARCHES = 64  # most searches of a job: a loop may broadcast in each step

_REMEDY = "; or use npu.distribute.SyncBatchNormalization(...) instead of BatchNormalization(synchronized=True, ...)."
_ALONE = (
    "batch normalization with synchronized=True uses the samples of each rank by itself: %s.\nLikely cause: the loop "
    "reduces gradients itself, and no variables were broadcast before the first step.\nWhat to do: call "
    f"npu.distribute.broadcast(model.weights) before the first step{_REMEDY}"
)
_TRACED_ALONE = (
    "batch normalization with synchronized=True uses the samples of each rank by itself in functions that were traced "
    "too early: %s.\nLikely cause: the tf.function was called before the optimizer was wrapped or variables were "
    "broadcast.\nWhat to do: wrap the optimizer, or call npu.distribute.broadcast(model.weights), before the first "
    f"call of the function{_REMEDY}"
)


@_as_it_is
def _moments_method(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Stand in for the method of a layer that computes mean and variance."""
    own = getattr(type(self), compat.moments_method(self)).__get__(self)
    # After the end of the job, the layer normalizes by itself.
    if jobs.current() is None:
        return own(*args, **kwargs)
    return moments_of_all_ranks(self, getattr(self, _GROUP), own, *args, **kwargs)


@_as_it_is
def _all_reduce(self: Any, reduce_op: Any, value: Any, options: Any = None) -> Any:
    """Stand in for ``all_reduce`` of TensorFlow's replica context; for sums that a synchronized layer asks for."""
    layers = jobs.current_component(SynchronizedLayers)
    caller = compat.normalization_at_work()
    sums = None
    if layers is not None and caller is not None:
        layer, inputs = caller
        sums = layers.sums_of_all_ranks(layer, inputs, value)
    # Other callers may use the context, too, and get TensorFlow's own method.
    if sums is None:
        return type(self).all_reduce(self, reduce_op, value, options)
    return sums


def normalizes_alone(layer: Any) -> bool:
    """Return True for a synchronized layer of Keras that got no method for all ranks."""
    name = compat.moments_method(layer)
    is_from_keras = compat.belongs_to_keras(getattr(type(layer), name))
    return bool(getattr(layer, "synchronized", False)) and is_from_keras and name not in vars(layer)


def _note_cast() -> None:
    """Find the layer that casts its moving mean in this thread."""
    layers = jobs.current_component(SynchronizedLayers)
    if layers is not None:
        layers.install(compat.called_normalizations())


class SynchronizedLayers:
    """The layers with ``synchronized=True`` in loops of the script; a component of the job."""

    def __init__(self) -> None:
        self._group = WORLD_GROUP  # group over which layers normalize
        self._end_of_notes: Any = None  # ends the notes of casts
        self._searches = 0
        self._traced = weakref.WeakKeyDictionary[Any, list[str]]()
        self._checked = set[tuple[int, str]]()
        self._told = weakref.WeakSet[Any]()

    def find(self, group: str) -> None:
        """Have layers normalize over a group: all that exist, and all that are called later, in any thread.

        Each layer keeps its first group.
        """
        self._group = group
        if self._searches < _SEARCHES:
            self._searches += 1
            self._install_existing()
        context = compat.default_replica_context()
        context.all_reduce = MethodType(_all_reduce, context)
        if self._end_of_notes is None:
            self._end_of_notes = compat.note_casts_of_keras_variables(_note_cast)

    def install(self, layers: Iterable) -> None:
        """Have those layers normalize over the group that would use their own samples only."""
        for layer in layers:
            if normalizes_alone(layer):
                vars(layer)[_GROUP] = self._group
                vars(layer)[compat.moments_method(layer)] = MethodType(_moments_method, layer)

    def sums_of_all_ranks(self, layer: Any, inputs: Any, sums: Any) -> Any:
        """Return the sums over the ranks for which a layer asks in its first call; None if it is to use its own."""
        # The layer's next call takes the method, with fewer transfers.
        self.install([layer])
        exchange = exchange_of_layer(vars(layer).get(_GROUP, self._group), inputs)
        if exchange is None:
            return None

        def of_all_ranks(own: tf.Tensor) -> tf.Tensor:
            # Summed in 32 bits, since 16-bit floats would be infinite, or lose the numbers of samples.
            wide = tf.cast(own, sum_dtype(own.dtype))
            # In a step of ``fit``, a rank without samples works on rows that don't count.
            wide *= tf.cast(sum_factor(), wide.dtype)
            exchanged = exchange(tf.reshape(wide, [-1]))
            total = tf.reshape(exchanged, tf.shape(wide))
            return tf.cast(total, own.dtype)

        return tf.nest.map_structure(of_all_ranks, sums)

    def note_reduced(self, shapes: list[tf.TensorShape]) -> None:
        """Warn of layers that normalize by one rank, if gradients of these shapes may be those of their variables."""
        # Counted, since each eager step comes here, and of a function only its trace.
        if tf.executing_eagerly():
            reduction = (len(shapes), str(shapes[0]))
            if reduction in self._checked or len(self._checked) >= _CHECKS:
                return
            self._checked.add(reduction)
        # A variable has a rank, so that its gradient has one, too.
        sizes = {tuple(shape) for shape in shapes if shape.rank is not None}
        trained = []
        for layer in compat.batch_normalizations():
            if layer not in self._told and _may_train(sizes, layer):
                trained.append(layer)
        alone = [layer for layer in trained if normalizes_alone(layer)]
        traced = [layer for layer in trained if layer in self._traced]
        # Each layer is named once.
        self._told.update(alone + traced)
        if alone:
            layer_names = [repr(layer.name) for layer in alone]
            _log.warning(_ALONE, ", ".join(sorted(layer_names)))
        if traced:
            names = {layer.name: ", ".join(self._traced[layer]) for layer in traced}
            places = [f"{layer!r} in {functions}" for layer, functions in sorted(names.items())]
            _log.warning(_TRACED_ALONE, "; ".join(places))

    def close(self) -> None:
        vars(compat.default_replica_context()).pop("all_reduce", None)
        if self._end_of_notes is not None:
            self._end_of_notes()

    def _install_existing(self) -> None:
        layers = compat.batch_normalizations()
        called = [layer for layer in layers if _is_built(layer) and normalizes_alone(layer)]
        self.install(layers)
        if not called:
            return
        # A function that has called one of the layers keeps the graph that was traced before. Only a new trace would
        # change that, so the next reduction warns.
        functions = compat.functions_that_update(layer.moving_mean for layer in called)
        for layer, names in zip(called, functions):
            if names:
                self._traced[layer] = names
        # Reductions of the same shapes may have been checked before.
        self._checked.clear()


def find_layers(world: World) -> None:
    """Have the synchronized layers of the script normalize over these ranks."""
    if can_compare():
        world.job.component_or_new(SynchronizedLayers).find(world.group.name)


def note_reduced(world: World, values: Any, by_samples: bool = False) -> None:
    """Note that what may be gradients is reduced in a loop; rank 0 warns of layers that normalize by one rank."""
    if not can_compare() or current_step() is not None:
        return
    tensors = [dense_of(value) for value in tf.nest.flatten(values) if hasattr(value, "shape")]
    shapes = [tf.TensorShape(tensor.shape) for tensor in tensors]
    # Numbers, also numpy's, are losses and counts: no gradients.
    if all(shape.rank == 0 for shape in shapes):
        return
    world.job.component_or_new(Loops).note_reduced(by_samples)
    # One rank is enough to warn, since the layers are the same on all ranks.
    if world.job.cluster.rank == 0:
        world.job.component_or_new(SynchronizedLayers).note_reduced(shapes)


def _is_built(layer: Any) -> bool:
    # A layer whose constructor has failed lacks attributes.
    return bool(getattr(layer, "built", False))


def _may_train(shapes: set, layer: Any) -> bool:
    """Return True if the gradients of a layer may be among tensors of these shapes."""
    if not _is_built(layer) or not layer.trainable:
        return False
    return {tuple(variable.shape) for variable in layer.trainable_variables} <= shapes
