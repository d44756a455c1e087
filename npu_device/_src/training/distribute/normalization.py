"""Batch normalization by the samples of all ranks: in steps of ``fit``, in loops of the script, and in a layer for it.

A layer of Keras with ``synchronized=True`` gets a method on the object. A loop says that all ranks train its model when
it wraps the optimizer or broadcasts variables. The layers that exist then are looked for in memory; later ones are seen
when they make their variables. Layers that aren't called are among them, too, and do nothing.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Iterable
from types import MethodType
from typing import Any, Callable

import tensorflow as tf

from npu_device._src import compat
from npu_device._src.collectives import job as jobs
from npu_device._src.collectives.graph import differentiable
from npu_device._src.gradients.reduction import ReductionOptions, dense_of
from npu_device._src.training.opening.current_world import world_unless_child
from npu_device._src.training.watching.schedule import can_compare, is_only_building
from npu_device._src.world.current_step import CurrentStep, current_step
from npu_device._src.world.world import World

_log = logging.getLogger("npu_device")
_as_it_is = tf.autograph.experimental.do_not_convert

Exchange = Callable[[tf.Tensor], tf.Tensor]
"""Returns the sum of all ranks' tensors: floating-point numbers, shape [n]."""

_GROUP = "_npu_normalizes_over"  # the attribute of a layer that got a method: the name of its group
_CHECKS = 16  # kinds of reductions at which layers are looked for
_ROUNDING = 1e-5

_ALONE = (
    "batch normalization with synchronized=True uses the samples of each rank by itself: %s.\nLikely cause: the loop "
    "reduces gradients itself, and no variables were broadcast before the layer was first called.\nWhat to do: call "
    "npu.distribute.broadcast(model.weights) before the first step; or use npu.distribute.SyncBatchNormalization(...) "
    "instead of BatchNormalization(synchronized=True, ...)."
)
_UNEVEN_START = (
    "the ranks had different numbers of samples in the first step. Its gradients through synchronized batch "
    "normalization counted all ranks alike; later ones count by samples, since weighted_mean reduces them.\nWhat to "
    "do: begin with the same number of samples on all ranks, or make the step a tf.function."
)


# Moments


def moments(
    exchange: Exchange, counts: Any, layer: Any, inputs: tf.Tensor, *rest: Any, mask: Any = None
) -> tuple[tf.Tensor, tf.Tensor]:
    """Return mean and variance over the samples of all ranks, with the arguments of the method of Keras's layer.

    ``counts`` is 1, or 0 if the samples of this rank don't count.
    """
    # Keras 3 passes the mask; tf-keras passes the axes and whether to keep their dimensions.
    axes, keep = rest if len(rest) == 2 else (compat.reduction_axes(layer), False)
    mask = rest[0] if len(rest) == 1 else mask
    wide = tf.cast(inputs, tf.float32) if inputs.dtype.size < 4 else inputs
    valid = tf.cast(counts, wide.dtype)
    if mask is not None:
        valid *= tf.broadcast_to(tf.cast(mask, wide.dtype)[..., tf.newaxis], tf.shape(wide))
    total = tf.reduce_sum(wide * valid, axes, keepdims=True)
    if mask is None:
        number = tf.fill(
            tf.shape(total), valid * tf.cast(tf.size(wide) / tf.size(total), wide.dtype)
        )
    else:
        number = tf.reduce_sum(valid, axes, keepdims=True)

    def of_all_ranks(*sums: tf.Tensor) -> list[tf.Tensor]:
        exchanged = exchange(tf.concat([tf.reshape(each, [-1]) for each in sums], 0))
        return [tf.reshape(each, tf.shape(total)) for each in tf.split(exchanged, len(sums))]

    total, number = of_all_ranks(total, number)
    number = tf.stop_gradient(number)
    mean = tf.math.divide_no_nan(total, number)
    # Around the common mean: the difference of mean squares would lose digits. Deviations from the mean add up to 0, so
    # the gradient needn't pass through it once more.
    spread = tf.reduce_sum(tf.square(wide - tf.stop_gradient(mean)) * valid, axes, keepdims=True)
    variance = tf.math.divide_no_nan(of_all_ranks(spread)[0], number)
    found = [mean, variance] if keep else [tf.squeeze(each, axes) for each in (mean, variance)]
    return tf.cast(found[0], inputs.dtype), tf.cast(found[1], inputs.dtype)


def exchange_of_step(step: CurrentStep, add_up: Exchange) -> Exchange:
    """Return how the ranks exchange sums in a step of ``fit``."""
    return lambda sums: step.exchanged(add_up(step.to_exchange(sums)))


def moments_of_all_ranks(
    layer: Any, own: Callable[..., Any], group: str, inputs: tf.Tensor, *rest: Any, **named: Any
) -> Any:
    """Return mean and variance over the ranks of a group; what ``own`` returns where there is only one process."""
    # Inside a strategy of TensorFlow for several devices, Keras adds up over those.
    is_alone = (
        is_only_building()
        or compat.is_saving()
        or tf.distribute.get_strategy().num_replicas_in_sync > 1
    )
    ranks = None if is_alone else world_unless_child(group)
    if ranks is None:
        return own(inputs, *rest, **named)
    step = current_step()
    if step is None:
        exchange = ranks.job.made(Loops).exchange(ranks, tf.shape(inputs)[0])
        return moments(exchange, 1.0, layer, inputs, *rest, **named)
    # The layer isn't part of the replicated model, or ``fit`` had replaced its method.
    add_up: Exchange = lambda sums: step.reduce([sums], ReductionOptions("sum", fusion=0))[0]  # noqa: E731
    return moments(exchange_of_step(step, add_up), step.counts, layer, inputs, *rest, **named)


class Loops:
    """How the loop of the script combines the gradients of the ranks; a part of the job.

    Each rank differentiates its own loss, and what the ranks exchange gets the gradient of the sum of these losses. If
    gradients are weighted by samples afterwards (``weighted_mean``), that sum is weighted, too. A script is expected to
    do the same in all of its steps.
    """

    def __init__(self) -> None:
        self._by_samples = False
        self._in_graphs: Any = (
            None  # the same, as a variable: functions are traced before it is known
        )
        self._was_uneven = False  # in the last eager backward pass
        self._is_open = (
            False  # gradients have passed through an exchange, and nothing was reduced since then
        )

    def note_reduced(self, values: Any, by_samples: bool) -> None:
        """Note how gradients are reduced, if that is what the values are."""
        if not self._is_open or not any(
            each.shape.rank for each in map(dense_of, _tensors(values))
        ):
            return
        self._is_open = False
        if by_samples == self._by_samples:
            return
        self._by_samples = by_samples
        if self._in_graphs is not None:
            with tf.init_scope():
                self._in_graphs.assign(by_samples)
        if self._was_uneven and tf.executing_eagerly():
            _log.warning("%s", _UNEVEN_START)

    def exchange(self, ranks: World, samples: tf.Tensor) -> Exchange:
        """Return how the ranks exchange sums in a step in which this rank has so many samples."""

        def add_up(sums: tf.Tensor) -> tf.Tensor:
            mine = tf.reshape(tf.cast(samples, sums.dtype), [1])  # travels along
            sent = _with_gradient(tf.concat([sums, mine], 0), lambda upstream: upstream / weight())
            total = ranks.add_up(sent)
            part = tf.stop_gradient(tf.math.divide_no_nan(mine, total[-1:]))
            weight = self._weight(part, ranks)
            return _with_gradient(total, lambda upstream: upstream * weight())[:-1]

        return add_up

    def _weight(self, part: tf.Tensor, ranks: World) -> Callable[[], tf.Tensor]:
        """Return what the backward pass calls for the weight of this rank's loss; ``part`` is its part of the samples.

        A rank without samples has a loss that doesn't depend on what is exchanged.
        """
        one = tf.ones_like(part)
        part = tf.where(part > 0, part, one)
        if not tf.executing_eagerly() and can_compare():
            if self._in_graphs is None:
                with tf.init_scope(), tf.device(ranks.job.device("CPU")):
                    self._in_graphs = compat.plain_variable(self._by_samples)
            # Read before the backward pass: TensorFlow can't build one of a branch that captures a variable itself.
            part = tf.where(self._in_graphs.read_value(), part, one)

        def weight() -> tf.Tensor:
            self._is_open = True
            if not tf.executing_eagerly():
                return part
            self._was_uneven = abs(float(part[0]) * ranks.size - 1) > _ROUNDING
            return part if self._by_samples else one

        return weight


def _with_gradient(tensor: tf.Tensor, backward: Callable[[tf.Tensor], tf.Tensor]) -> tf.Tensor:
    return differentiable([tf.identity(tensor)], lambda upstream: [backward(upstream)], [tensor])[0]


# Layers


@_as_it_is
def _method(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Stand in for the method of a layer that computes mean and variance."""
    own = getattr(type(self), compat.moments_method(self)).__get__(self)
    if jobs.current() is None:  # closed
        return own(*args, **kwargs)
    return moments_of_all_ranks(self, own, getattr(self, _GROUP), *args, **kwargs)


def is_alone(layer: Any) -> bool:
    """Return True for a synchronized layer of Keras that got no method for all ranks."""
    name = compat.moments_method(layer)
    is_from_keras = compat.belongs_to_keras(getattr(type(layer), name))
    return bool(getattr(layer, "synchronized", False)) and is_from_keras and name not in vars(layer)


class SynchronizedLayers:
    """The layers with ``synchronized=True`` in loops of the script; a part of the job."""

    def __init__(self) -> None:
        self._group: str | None = None  # over which layers normalize
        self._creation: Any = None  # the scope in which later variables are made
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet()  # all batch normalizations
        self._checked: set[tuple[int, str]] = set()
        self._told: weakref.WeakSet[Any] = weakref.WeakSet()

    def find(self, group: str) -> None:
        """Have layers normalize over a group: all that exist, and all that make their variables in this thread later.

        Each layer keeps its first group.
        """
        self._group = group
        self._install(compat.batch_normalizations())
        # Scopes must end in reverse order, and this one ends with the job. So it isn't begun inside another one. It is
        # begun again after keras.backend.clear_session().
        if tf.executing_eagerly() and not compat.has_variable_creators():
            self._creation = tf.variable_creator_scope(self._create)
            self._creation.__enter__()

    def note_reduced(self, values: Any) -> None:
        """Warn of layers that normalize by one rank, if these may be the gradients of their variables."""
        tensors = list(map(dense_of, _tensors(values)))
        if tf.executing_eagerly():  # each step comes here; of a function, only its trace
            kind = (len(tensors), str(tensors[0].shape) if tensors else "")
            if kind in self._checked or len(self._checked) >= _CHECKS:
                return
            self._checked.add(kind)
        layers = [
            layer
            for layer in compat.batch_normalizations()
            if is_alone(layer) and layer not in self._told
        ]
        shapes = {tuple(each.shape) for each in tensors}
        alone = [
            layer
            for layer in layers
            if layer.built and layer.trainable and _may_train(shapes, layer)
        ]
        self._told.update(alone)
        if alone:
            _log.warning(_ALONE, ", ".join(sorted(repr(layer.name) for layer in alone)))

    def close(self) -> None:
        with contextlib.suppress(
            RuntimeError
        ):  # another scope is open, which will end later or never
            if self._creation is not None:
                self._creation.__exit__(None, None, None)

    def _install(self, layers: Iterable[Any]) -> None:
        for layer in layers:
            self._seen.add(layer)
            if is_alone(layer):
                vars(layer)[_GROUP] = self._group
                vars(layer)[compat.moments_method(layer)] = MethodType(_method, layer)

    def _create(self, next_creator: Callable[..., Any], **keywords: Any) -> Any:
        """Look for the layer that makes a variable; the arguments are those of ``tf.variable_creator_scope``."""
        if jobs.current() is not None:
            self._look_around(keywords.get("name"))
        return next_creator(**keywords)

    def _look_around(self, name: str | None) -> None:
        variables = []
        for thing in compat.objects_at_work():
            if not compat.is_layer(thing):
                variables.append(thing)
                continue
            if compat.is_batch_normalization(thing):
                self._install([thing])
                return
            break
        # Keras 3 gives the variables of a model their values after it has built all layers.
        variables = [each for each in variables if compat.belongs_to_keras(type(each))]
        known = [getattr(layer, "moving_mean", None) for layer in self._seen]
        is_known = any(one is variable for one in known for variable in variables)
        if name == "moving_mean" and variables and not is_known:
            self._install(compat.batch_normalizations())


def find_layers(ranks: World) -> None:
    """Have the synchronized layers of the script normalize over these ranks."""
    if can_compare():
        ranks.job.made(SynchronizedLayers).find(ranks.group.name)


def note_reduced(ranks: World, values: Any, by_samples: bool = False) -> None:
    """Note that what may be gradients is reduced in a loop; rank 0 warns of layers that normalize by one rank."""
    if not can_compare() or current_step() is not None:
        return
    ranks.job.made(Loops).note_reduced(values, by_samples)
    if ranks.job.cluster.rank == 0:
        ranks.job.made(SynchronizedLayers).note_reduced(values)


def _may_train(shapes: set[Any], layer: Any) -> bool:
    return {tuple(variable.shape) for variable in layer.trainable_variables} <= shapes


def _tensors(values: Any) -> list[Any]:
    return [each for each in tf.nest.flatten(values) if hasattr(each, "shape")]
