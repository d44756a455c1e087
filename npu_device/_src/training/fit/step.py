"""The road of one batch through a replicated model: taken, checked, divided, stepped, reduced, logged.

``train_or_test_step`` and ``predict_step`` below are the road. They stand in for the model's own steps; the rest of the
file is what they call, in that order. How a loss, a metric or an optimizer takes part is in ``weighting``.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import Any, Callable

import numpy as np
import tensorflow as tf

from npu_device._src import compat, environment
from npu_device._src.training.fit import xla
from npu_device._src.training.fit.randomness import NumbersOfRank
from npu_device._src.training.fit.replaced import Replaced
from npu_device._src.training.fit.step_context import StepContext
from npu_device._src.training.fit.weighting import Losses, Metrics, synchronise_normalisation
from npu_device._src.world.current_step import CurrentStep, current_step, running
from npu_device._src.world.share import Share, content, is_divided, share_of_batch, tag_of
from npu_device._src.world.world import World

_log = logging.getLogger("npu_device")
_COMPUTED = (
    "the step of a replicated %s computes %s from a metric's result. In the step that is the result of this rank's "
    "samples, so that the logs hold the mean of what the ranks compute.\nWhat to do: compute it in a metric class, or "
    "in a callback from the logs, which hold the results of all ranks."
)

LOGS = "logs"
"""The name of the logs of a step among those who take numbers; see ``CurrentStep.is_sum``."""

_as_it_is = tf.autograph.experimental.do_not_convert


def train_or_test_step(context: StepContext, own: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a model's ``train_step`` or ``test_step``, given its own one: Keras's or the user's."""

    # tf-keras has AutoGraph rewrite this, for the sake of the user's step inside. So it holds no more than the road.
    @functools.wraps(own)
    def step(data: Any) -> Any:
        if (
            current_step() is not None
        ):  # a step that another model's step calls, whose share it works on
            return own(data)
        batch = _take(context, data)
        share = divide(context.world, batch)
        with _begin(context, share) as mine:
            logs = own(share.data)  # whose optimizers reduce the gradients
        return mine.results_of_all(logs)

    return step


def predict_step(context: StepContext, own: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(own)
    def step(data: Any) -> Any:
        batch = _take(context, data)
        share = divide(context.world, batch)
        with running(_current(context, share)):
            mine = own(share.data)
        outputs = _gather(context.world, share, mine)
        return own(batch) if outputs is None else outputs

    return step


# Taken and checked.


@_as_it_is
def _take(context: StepContext, data: Any) -> Any:
    """Return the batch to work on: rank 0's, if the ranks' differ; else it is counted in their checksum."""
    if is_divided(data):
        context.checksum.add(tag_of(data)[1])
        return data
    if not context.from_root:
        context.checksum.add(data)
        return data
    leaves = tf.nest.flatten(data)
    arrived = iter(context.world.from_root([leaf for leaf in leaves if _is_sent_as_it_is(leaf)]))
    as_bytes = functools.partial(_sent_as_bytes, context.world)
    found = [
        next(arrived)
        if _is_sent_as_it_is(leaf)
        else tf.nest.map_structure(as_bytes, leaf, expand_composites=True)
        for leaf in leaves
    ]
    return tf.nest.pack_sequence_as(data, found)


def _is_sent_as_it_is(leaf: Any) -> bool:
    return (
        isinstance(leaf, tf.Tensor)
        and leaf.dtype != tf.string
        and leaf.shape[1:].is_fully_defined()
    )


def _sent_as_bytes(world: World, tensor: Any) -> Any:
    """Return rank 0's tensor: strings, or parts of sparse and ragged ones, whose sizes the other ranks don't know."""
    if tensor is None:
        return None
    mine = tf.io.decode_raw(tf.io.serialize_tensor(tensor), tf.uint8)
    [length] = world.from_root([tf.size(mine, tf.int64)])
    [sent] = world.from_root([mine if world.is_main else tf.zeros([length], tf.uint8)])
    every = tf.constant([bytes([value]) for value in range(256)])
    found = tf.io.parse_tensor(
        tf.strings.reduce_join(tf.gather(every, tf.cast(sent, tf.int32))), tensor.dtype
    )
    return tf.ensure_shape(found, tensor.shape)


# Divided.


@_as_it_is
def divide(world: World, batch: Any) -> Share:
    if is_divided(batch):
        rows = tf.cast(tag_of(batch)[0], tf.int32)
        return Share(content(batch), rows, world.add_up(rows))
    return share_of_batch(batch, world.rank, world.size, environment.NPU_DEVICE_DIVISION.get())


# Stepped.


@_as_it_is
def _current(context: StepContext, share: Share) -> CurrentStep:
    return CurrentStep(
        share, context.is_from_script, context.world.reduce, context.world.gather, context.sums
    )


class Step:
    """One step while it is running or being traced: a context in which the model works on the share of this rank."""

    def __init__(self, context: StepContext, share: Share) -> None:
        world, parts, training = context.world, context.parts, context.kind == "train"
        self._world = world
        self._context = context
        self._current = current = _current(context, share)
        self._replaced = Replaced()
        self._metrics = Metrics(parts, current, world, self._replaced)
        Losses(context.model, parts, current, world, self._replaced)
        if xla.compiles_call(context.model):
            xla.compile_call(context.model, self._replaced)
        if training:
            synchronise_normalisation(parts.layers, current, world, self._replaced)
        self._numbers = NumbersOfRank(world, parts.generators, self._replaced) if training else None
        # Metrics add up, so the ranks' increments are added. Moving averages move by the average of the increments.
        counted = [(variable, current.counts) for variable in self._metrics.added_up()]
        moved = [(variable, current.weight) for variable in parts.statistics] if training else []
        self._increments = Increments(counted + moved, world.add_up)
        self._metrics.settle = self._increments.reduce

    def __enter__(self) -> Step:
        self._seen = running(self._current)
        self._seen.__enter__()
        _ = self._current.weight  # in this graph, before a branch of the step needs it
        if self._numbers is not None:
            self._numbers.begin()
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        self._seen.__exit__(kind, error, traceback)
        self._replaced.restore()
        if self._numbers is not None:
            self._numbers.end()
            if error is None:
                self._context.settle_draws(self._numbers, self._current.share)

    @_as_it_is
    def results_of_all(self, logs: Any) -> Any:
        """Give metrics and statistics the values of all ranks, and return the logs with those."""
        self._increments.reduce()
        values = tf.nest.flatten(logs)
        are_sums = [self._current.is_sum(LOGS, value) for value in values]
        again, lost = self._metrics.results_again(values)
        if lost and self._world.is_main:
            named = logs.items() if isinstance(logs, dict) else ()
            names = [
                repr(name) for name, value in named if any(value is values[place] for place in lost)
            ]
            _log.warning(_COMPUTED, type(self._context.model).__name__, ", ".join(names) or "logs")
        others = [place for place, result in enumerate(again) if result is None]
        rest = iter(
            self._of_all_ranks(
                [values[place] for place in others], [are_sums[place] for place in others]
            )
        )
        return tf.nest.pack_sequence_as(
            logs, [next(rest) if result is None else result for result in again]
        )

    def _of_all_ranks(self, values: Sequence[Any], are_sums: Sequence[bool | None]) -> list[Any]:
        """Return scalars of the logs of all ranks: sums added up, other numbers averaged by samples."""
        found = [
            compat.to_tensor(value) if isinstance(value, (float, np.floating)) else value
            for value in values
        ]
        scalars = [
            place
            for place, value in enumerate(found)
            if tf.is_tensor(value) and value.shape.rank == 0
        ]
        counted = [place for place in scalars if found[place].dtype.is_floating]
        counted += [place for place in scalars if found[place].dtype.is_integer and are_sums[place]]
        if counted:
            current = self._current
            weights = [current.counts if are_sums[place] else current.weight for place in counted]
            parts = [
                tf.cast(found[place], tf.float64) * weight
                for place, weight in zip(counted, weights)
            ]
            for place, value in zip(counted, tf.unstack(self._world.add_up(tf.stack(parts)))):
                found[place] = tf.cast(value, found[place].dtype)
        return found


@_as_it_is
def _begin(context: StepContext, share: Share) -> Step:
    return Step(context, share)


# Reduced.


class Increments:
    """The values of variables before a step, so that their increments, times weights, can be added up after it."""

    def __init__(
        self, variables: Sequence[tuple[Any, Any]], add_up: Callable[[tf.Tensor], tf.Tensor]
    ) -> None:
        self._add_up = add_up
        groups: dict[tuple[tf.DType, int], list[Any]] = {}
        factors = {id(factor): factor for _, factor in variables}
        for variable, factor in variables:
            groups.setdefault((tf.as_dtype(variable.dtype), id(factor)), []).append(variable)
        # Packed, since a step has hundreds of such variables and few operations to spare for each.
        self._groups = [
            (dtype, members, factors[key], _packed(members))
            for (dtype, key), members in groups.items()
        ]

    def reduce(self) -> None:
        """Give each variable its value before the step plus the sum of all ranks' increments."""
        for dtype in dict.fromkeys(dtype for dtype, *_ in self._groups):
            groups = [group for group in self._groups if group[0] == dtype]
            moved = [
                _times(_packed(members) - before, factor) for _, members, factor, before in groups
            ]
            before = tf.concat([before for *_, before in groups], axis=0)
            total = before + self._add_up(tf.concat(moved, axis=0))
            members = [member for _, members, *_ in groups for member in members]
            sizes = [tf.TensorShape(member.shape).num_elements() for member in members]
            for member, value in zip(members, tf.split(total, sizes)):
                member.assign(value if len(member.shape) == 1 else tf.reshape(value, member.shape))
        # From here on, for a step that reads results halfway.
        self._groups = [
            (dtype, members, factor, _packed(members)) for dtype, members, factor, _ in self._groups
        ]


def _packed(variables: Sequence[Any]) -> tf.Tensor:
    values = [tf.convert_to_tensor(variable) for variable in variables]
    return tf.concat(
        [value if value.shape.rank == 1 else tf.reshape(value, [-1]) for value in values], axis=0
    )


def _times(value: tf.Tensor, factor: Any) -> tf.Tensor:
    if not tf.is_tensor(factor) and factor == 1.0:
        return value
    if value.dtype.is_floating:
        return value * tf.cast(factor, value.dtype)
    return tf.where(
        factor > 0, value, tf.zeros_like(value)
    )  # an integer counts in full or not at all


# Logged.


@_as_it_is
def _gather(world: World, share: Share, outputs: Any) -> Any:
    """Return all ranks' predictions in the order of the batch; None if there isn't one per sample."""
    leaves = tf.nest.flatten(outputs)
    for leaf in leaves:
        dense = isinstance(leaf, tf.Tensor) and (
            leaf.dtype.is_floating or leaf.dtype.is_integer or leaf.dtype.is_bool
        )
        if not dense or leaf.shape.rank == 0:
            return None
    return tf.nest.pack_sequence_as(outputs, [world.gather(share.counted(leaf)) for leaf in leaves])
