"""The road of one batch through a replicated model: taken and counted in the checksum, divided, stepped (the optimizer
reduces the gradients inside), the increments of metrics and moving averages summed, logged.

``train_or_test_step`` and ``predict_step`` below are the road. They stand in for the model's own steps; the rest of the
file is what they call, in that order. How losses, metrics, logs, layers and optimizers take part is in ``losses``,
``metrics``, ``logs``, ``distribute.normalization`` and ``weighting``.

Three objects go by the name of a step:

- ``StepContext``: the settings of all steps of a model that train, or test, or predict; it is their ``Function``
- ``Step``: one of them while it runs or is traced; replaces methods until it ends
- ``CurrentStep``: what losses, metrics, optimizers and calls of the script see of it
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Iterable, Sequence
from typing import Any, Callable, NamedTuple, Optional

import tensorflow as tf

from npu_device._src import compat, environment
from npu_device._src.collectives.group import WORLD_GROUP
from npu_device._src.training.distribute.normalization import moments_of_all_ranks
from npu_device._src.training.fit import predictions, xla
from npu_device._src.training.fit.logs import LOGS, OwnLogs, as_tensor
from npu_device._src.training.fit.losses import Losses
from npu_device._src.training.fit.metrics import Metrics
from npu_device._src.training.fit.randomness import RandomNumbers
from npu_device._src.training.fit.replaced import Replaced
from npu_device._src.training.fit.step_context import StepContext
from npu_device._src.world.current_step import CurrentStep, current_step, running
from npu_device._src.world.share import (
    Share,
    content,
    count_of,
    is_tagged,
    mark_of,
    share_of_batch,
    spec_of_any_length,
)
from npu_device._src.world.world import World

_log = logging.getLogger("npu_device")
_COMPUTED_LOGS_WARNING = (
    "the step of a replicated %s computes %s from a metric's result. In the step that is the result of this rank's "
    "samples, so that the logs hold the mean of what the ranks compute.\nWhat to do: compute it in a metric class, or "
    "in a callback from the logs, which hold the results of all ranks."
)


def train_or_test_step(context: StepContext) -> Callable[[Any], Any]:
    """Return what stands in for a model's ``train_step`` or ``test_step``, and calls it: Keras's or the user's."""
    own_step = context.own_step

    # tf-keras has AutoGraph rewrite this, for the sake of the user's step inside, so that it only calls other
    # functions.
    @functools.wraps(own_step)
    def step(data: Any) -> Any:
        # A step inside another model's step works on that model's share.
        if current_step() is not None:
            return own_step(data)
        batch = _batch_to_use(context, data)
        share = share_of_rank(context.world, batch)
        with Step(context, share) as running_step:
            # The optimizers in the step reduce the gradients: ``weighting``.
            logs = own_step(share.data)
        return running_step.results_of_all(logs)

    return step


def predict_step(context: StepContext) -> Callable[[Any], Any]:
    """Return what stands in for a model's ``predict_step``, and calls it: Keras's or the user's."""
    own_step = context.own_step

    @functools.wraps(own_step)
    def step(data: Any) -> Any:
        batch = _batch_to_use(context, data)
        share = share_of_rank(context.world, batch)
        # No ``Step``: without losses and metrics, no method has to be replaced.
        with running(_current_step(context, share)):
            own_outputs = own_step(share.data)
        outputs = predictions.of_all_ranks(context, batch, share, own_outputs)
        return own_step(batch) if outputs is None else outputs

    return step


# The batch, taken and checked


@compat.do_not_convert
def _batch_to_use(context: StepContext, batch: Any) -> Any:
    """Return the batch to work on: rank 0's, once it sends its batches; else this one, counted in the checksum."""
    if is_tagged(batch):
        # 0 for ``divided``, whose ranks read different rows: there is nothing to compare.
        context.checksum.add(mark_of(batch))
        return batch
    if not context.batches_from_root:
        context.checksum.add(batch)
        return batch
    # Parts of sparse and ragged tensors are sent like others.
    leaves = tf.nest.flatten(batch, expand_composites=True)
    tensors = [tf.convert_to_tensor(leaf) for leaf in leaves if leaf is not None]
    # A smaller batch may come at another step on each rank.
    arrived = iter(context.world.from_root_of_any_size(tensors))
    for position, leaf in enumerate(leaves):
        if leaf is not None:
            leaves[position] = next(arrived)
    structure = batch
    if tf.executing_eagerly():
        structure = tf.nest.map_structure(_without_own_shape, batch)
    return tf.nest.pack_sequence_as(structure, leaves, expand_composites=True)


def _without_own_shape(leaf: Any) -> Any:
    """Return the type of a sparse or ragged tensor of any size, since an eager one has the shape of its own batch."""
    if isinstance(leaf, tf.SparseTensor):
        return tf.SparseTensorSpec(None, leaf.dtype)
    if isinstance(leaf, tf.RaggedTensor):
        return spec_of_any_length(leaf)
    return leaf


# The share of this rank, and the step on it


@compat.do_not_convert
def share_of_rank(world: World, batch: Any) -> Share:
    """Return the share of this rank in a batch: a run of its units, or all of a batch of its own (``divided``)."""
    if is_tagged(batch):
        rows = tf.cast(count_of(batch), tf.int32)
        return Share(content(batch), rows, world.sum_over_ranks(rows))
    division = environment.NPU_DEVICE_DIVISION.get()
    return share_of_batch(batch, world.rank, world.size, division)


@compat.do_not_convert
def _current_step(context: StepContext, share: Share) -> CurrentStep:
    return CurrentStep(share, context.is_custom, context.world, context.sums)


class Step:
    """One step while it is running or being traced: a context in which the model works on the share of this rank."""

    _metrics: Metrics
    _replaced: Replaced  # gives back what the step has replaced

    def __init__(self, context: StepContext, share: Share) -> None:
        self._context = context
        self._world = context.world
        self._current = _current_step(context, share)
        self._random_numbers: Optional[RandomNumbers] = None
        self._increments = Increments(context.world.sum_over_ranks)

    @compat.do_not_convert
    def __enter__(self) -> Step:
        # Gives the methods back after an error midway, too.
        with Replaced() as replaced:
            self._replace_methods(replaced)
            replaced.enter_context(running(self._current))
            # Computed in this graph, before a branch or a function of the step needs them.
            _ = self._current.fraction, self._current.sum_factor
            draws_its_own = environment.NPU_DEVICE_STEP_RANDOM.get() != "same"
            if self._context.mode == "train" and draws_its_own:
                generators = self._context.objects.generators
                self._random_numbers = RandomNumbers(self._world, generators, replaced)
            self._replaced = replaced.pop_all()
        return self

    def _replace_methods(self, replaced: Replaced) -> None:
        """Let parts of the model take part in the step, and note the variables whose increments are summed after it."""
        model = self._context.model
        objects = self._context.objects
        current = self._current
        self._metrics = Metrics(objects, current, replaced, self._reduce_increments)
        # Only replaces methods of losses and layers, so that nothing has to refer to it.
        Losses(model, objects, current, replaced)
        if xla.compiles_call(model):
            xla.compile_call(model, replaced)
        # Metrics move by the sum of the ranks' increments, moving averages by their mean.
        self._increments.add(self._metrics.additive_variables(), current.sum_factor)
        if self._context.mode == "train":
            _synchronize_layers(objects.layers, replaced)
            self._increments.add(objects.statistics, current.fraction)

    def __exit__(self, error_class: Any, error: Any, traceback: Any) -> None:
        self._replaced.close()
        if self._random_numbers is not None and error is None:
            self._context.after_draws(self._random_numbers, self._current.share)

    @compat.do_not_convert
    def results_of_all(self, logs: Any) -> Any:
        """Give metrics and statistics the values of all ranks, and return the logs with those."""
        self._reduce_increments()
        leaves = tf.nest.flatten(logs)
        metric_results, not_computable = self._metrics.results_again(leaves)
        if not_computable and self._world.is_main:
            self._warn_of_computed_logs(logs, not_computable)
        numbers = list(map(as_tensor, leaves))
        own_logs = OwnLogs(self._current, functools.partial(self._warn_of_log, logs))
        for position, result in enumerate(metric_results):
            if result is None:
                own_logs.add(position, numbers[position])
            else:
                self._current.register_number(LOGS, numbers[position])
                numbers[position] = as_tensor(result)
        for position, log in own_logs.of_all_ranks(self._world.sum_over_ranks):
            numbers[position] = log
        return tf.nest.pack_sequence_as(logs, numbers)

    def _reduce_increments(self) -> None:
        # A graph is traced once more if a metric has made its variables in the step. Keras's metrics begin with zeros.
        if tf.executing_eagerly():
            variables = self._metrics.additive_variables()
            self._increments.add(variables, self._current.sum_factor, tf.zeros_like)
        self._increments.reduce()

    def _warn_of_log(self, logs: Any, text: str, position: int) -> None:
        """Warn of a log, once in eager mode, too; ``text`` has places for its name and for the class of the model."""
        name = f"at position {position}"
        if isinstance(logs, dict) and len(logs) == len(tf.nest.flatten(logs)):
            name = repr(sorted(logs)[position])
        if self._world.is_main and (text, name) not in self._context.warned_logs:
            self._context.warned_logs.add((text, name))
            _log.warning(text, name, type(self._context.model).__name__)

    def _warn_of_computed_logs(self, logs: Any, leaves: Sequence) -> None:
        """Warn that some leaves of the logs are those of this rank's samples."""
        names: list[str] = []
        if isinstance(logs, dict):
            ids = set(map(id, leaves))
            names = [repr(name) for name, leaf in logs.items() if id(leaf) in ids]
        class_name = type(self._context.model).__name__
        _log.warning(_COMPUTED_LOGS_WARNING, class_name, ", ".join(names) or "logs")


def _synchronize_layers(layers: Sequence, replaced: Replaced) -> None:
    """Let synchronized layers compute mean and variance of the samples of all ranks."""
    for layer in layers:
        name = compat.moments_method(layer)
        if getattr(layer, "synchronized", False) and hasattr(layer, name):
            moments = functools.partial(moments_of_all_ranks, layer, WORLD_GROUP)
            replaced.replace(layer, name, moments)


# Variables that are reduced by their increments


class _Group(NamedTuple):
    """Variables of one dtype and one factor, and their values before the step."""

    dtype: tf.DType
    factor: Any
    variables: list
    values: list


class Increments:
    """The values of variables before a step, so that their increments, times factors, can be summed after it."""

    def __init__(self, sum_over_ranks: Callable[[tf.Tensor], tf.Tensor]) -> None:
        self._sum_over_ranks = sum_over_ranks
        self._groups: list[_Group] = []

    def add(
        self,
        variables: Sequence,
        factor: Any,
        value_before: Callable[[Any], tf.Tensor] = tf.convert_to_tensor,
    ) -> None:
        """Add variables, but for those that are there already, given the function for their values before the step."""
        added_before = {id(variable) for group in self._groups for variable in group.variables}
        by_dtype: dict[tf.DType, list] = {}
        for variable in variables:
            if id(variable) not in added_before:
                by_dtype.setdefault(tf.as_dtype(variable.dtype), []).append(variable)
        for dtype, added in by_dtype.items():
            self._groups.append(_Group(dtype, factor, added, list(map(value_before, added))))

    def reduce(self) -> None:
        """Give each variable its value before the step plus the sum of all ranks' increments."""
        # One reduction for each dtype, since the factors are applied before it.
        for dtype in dict.fromkeys(group.dtype for group in self._groups):
            self._reduce([group for group in self._groups if group.dtype == dtype])
        # The next increments begin here, for a step that reads results halfway.
        for group in self._groups:
            group.values[:] = map(tf.convert_to_tensor, group.variables)

    def _reduce(self, groups: Sequence[_Group]) -> None:
        variables: list = []
        starts = []
        increments = []
        for group in groups:
            # Variables that a step, as it is traced, leaves alone stay as they are.
            may_be_set = compat.may_be_set(group.variables)
            if any(may_be_set):
                moved = list(itertools.compress(group.variables, may_be_set))
                start = _finite(_packed(itertools.compress(group.values, may_be_set)))
                variables += moved
                starts.append(start)
                increments.append(_weighted(_packed(moved) - start, group.factor))
        # The same on all ranks, which trace the same step.
        if not variables:
            return
        sums = self._sum_over_ranks(tf.concat(increments, axis=0))
        total = tf.concat(starts, axis=0) + sums
        sizes = [tf.TensorShape(variable.shape).num_elements() for variable in variables]
        for variable, flat in zip(variables, tf.split(total, sizes)):
            variable.assign(_reshaped(flat, variable.shape))


def _finite(start: tf.Tensor) -> tf.Tensor:
    """Return values with 0 for inf and NaN, to which nothing can be added."""
    if not start.dtype.is_floating:
        return start
    return tf.where(tf.math.is_finite(start), start, tf.zeros_like(start))


def _packed(variables: Iterable) -> tf.Tensor:
    """Return the values of variables of one dtype, or tensors, one after the other.

    In one tensor, since operations for each of hundreds of variables would cost more than the step.
    """
    tensors = map(tf.convert_to_tensor, variables)
    return tf.concat([_reshaped(tensor, [-1]) for tensor in tensors], axis=0)


def _reshaped(tensor: tf.Tensor, shape: Any) -> tf.Tensor:
    """Return a tensor with another shape, without an operation if both are vectors."""
    if tensor.shape.rank == 1 and len(shape) == 1:
        return tensor
    return tf.reshape(tensor, shape)


def _weighted(increment: tf.Tensor, factor: Any) -> tf.Tensor:
    if not tf.is_tensor(factor) and factor == 1.0:
        return increment
    weighted = increment
    # No fraction of an integer is an integer: it counts in full or not at all.
    if increment.dtype.is_floating:
        weighted = increment * tf.cast(factor, increment.dtype)
    # Without samples, not even inf or NaN counts.
    return tf.where(factor > 0, weighted, tf.zeros_like(increment))
