"""``npu_distributed_keras_optimizer_wrapper``: a Keras optimizer that reduces gradients before it uses them.

The methods that it replaces are in ``reducing_methods``.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import operator
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Callable

import tensorflow as tf

from npu_device._src import compat, environment
from npu_device._src.collectives.group import WORLD_GROUP
from npu_device._src.collectives.ops import all_reduce
from npu_device._src.gradients.reduction import (
    Gradient,
    Owners,
    ReductionOptions,
    all_finite,
    compared_with_one_process,
    dense_tensors,
    origin_of,
    weighted,
    with_nan_unless,
)
from npu_device._src.trace.trace import iteration
from npu_device._src.training.distribute.synchronized_layers import find_layers, note_reduced
from npu_device._src.training.opening.current_world import world_unless_child
from npu_device._src.training.optimizers.accumulation import (
    accumulate,
    is_update,
    note_accumulators,
)
from npu_device._src.training.optimizers.finite_gradients import checked
from npu_device._src.training.optimizers.reducing_methods import install
from npu_device._src.training.sharding.divided_update import DividedUpdate
from npu_device._src.training.sharding.divisible import divided_update, tell_undivided
from npu_device._src.training.watching.replica_audit import Audit
from npu_device._src.training.watching.same_samples import Pair, pair_of
from npu_device._src.training.watching.same_variables import ComparedVariables, make_equal
from npu_device._src.training.watching.schedule import can_compare, only_building
from npu_device._src.training.watching.wrapped_optimizers import is_wrapped, reducing_optimizer
from npu_device._src.world.world import World

_REDUCED_BY = "_npu_reduced_by"
"""The attribute of a tensor that has the id of the reducer whose result it is."""


def npu_distributed_keras_optimizer_wrapper(
    optimizer: Any,
    reduce_reduction: str = "mean",
    fusion: int = 1,
    fusion_id: int = -1,
    group: str = WORLD_GROUP,
    compression: str | None = None,
    shard_optimizer: bool | None = None,
) -> Any:
    """Make an optimizer reduce its gradients over all ranks before clipping and applying them.

    Args:
        optimizer: a Keras optimizer: Keras 3, tf-keras, tf-keras legacy, a ``LossScaleOptimizer`` of any of them; or a
            name or config that ``tf.keras.optimizers.get`` understands.
        reduce_reduction: ``"mean"`` (default) or ``"sum"``; also ``"min"``, ``"max"``, ``"prod"``.
        fusion: as in ``all_reduce``.
        fusion_id: as in ``all_reduce``.
        group: name of the group.
        compression: as in ``all_reduce``.
        shard_optimizer: divide the updates among the ranks (ZeRO stage 1): each rank holds the state of some variables,
            updates those, and sends them to the others, with the same result. What can't be divided isn't, and a
            warning says why. Default: ``NPU_DEVICE_SHARD_OPTIMIZER``. The same on every rank.

    Returns:
        The same optimizer object. Its class, variables, checkpoints and config stay as they are; a model saved with it
        loads anywhere, with a plain optimizer that has to be wrapped again. On a single device it is untouched.

    Raises:
        ValueError: the optimizer is wrapped already (it would reduce twice); unknown reduction, group, fusion or
            compression.
        TypeError: not a Keras optimizer.
        RuntimeError: the environment names several ranks but the job can't be joined any more.

    Works in custom loops (``apply_gradients``, Keras 3's ``apply``) and in ``fit``. With
    ``gradient_accumulation_steps`` each rank adds up its gradients, and a sum or mean is reduced in the step that
    updates the variables; sparse gradients in each step, where that moves fewer bytes. With a loss-scale optimizer,
    wrap either it or its inner optimizer; the ranks agree on whether the gradients are finite either way. Use either
    this wrapper or ``all_reduce`` by hand, not both.

    Variables that differ between ranks get the values of rank 0, with a warning, before the first step that trains
    them. Broadcast those that it isn't given, such as the weights of frozen layers.

    >>> import tensorflow as tf
    >>> import npu_device as npu
    >>> optimizer = tf.keras.optimizers.SGD(0.5)
    >>> npu.distribute.npu_distributed_keras_optimizer_wrapper(optimizer) is optimizer
    True
    >>> weight = tf.Variable(1.0)
    >>> _ = optimizer.apply_gradients([(tf.constant(1.0), weight)])  # a single device
    >>> float(weight)
    0.5

    Source: Ascend TF Adapter 2.x, ``npu.distribute.npu_distributed_keras_optimizer_wrapper``.
    """
    if optimizer is None:
        raise TypeError("expected a Keras optimizer, or a name such as 'sgd'; found None")
    # Options are checked first, so that wrong arguments are an error on a single device, too.
    options = ReductionOptions(reduce_reduction, fusion, fusion_id, compression=compression)
    if isinstance(optimizer, (str, dict)):
        optimizer = tf.keras.optimizers.get(optimizer)
    world = world_unless_child(group)
    if world is None:
        return optimizer
    if is_wrapped(optimizer):
        raise ValueError(
            f"rank {world.job.cluster.rank}: this {type(optimizer).__name__} is wrapped already; wrapping it, or "
            "the loss-scale optimizer around it, a second time would reduce its gradients twice.\nWhat to do: call "
            "npu_distributed_keras_optimizer_wrapper once per optimizer."
        )
    # A layer that normalizes over all ranks may be called before the first gradients.
    find_layers(world)
    GradientReducer(world, options).install(optimizer, shard_optimizer)
    return optimizer


DistributedOptimizer = npu_distributed_keras_optimizer_wrapper


class GradientReducer:
    """Reduces the gradients of one optimizer: its settings, and which gradients have been reduced."""

    def __init__(self, world: World, options: ReductionOptions) -> None:
        self.options = options
        # True under Horovod's names, whose scripts may broadcast after the first step.
        self.has_own_batches = False
        # True if a step has applied gradients, or was only traced, since it was last built.
        self.has_applied = False
        # True if Horovod's optimizer adds up the gradients of several batches before they come here.
        self.adds_up_first = False
        self.world = world
        self._applying: Any = None  # the optimizer whose gradients are ready
        self._compared = ComparedVariables()
        # False if ``begin`` found variables without values: then the first step is audited, too.
        self._has_compared = True
        self._audit: Audit | None = None
        self._pair: Pair | None = None  # the gradients that were reduced last, and their results
        # Whether the first gradient of a variable was reduced in the update only, by the id of the variable.
        self._waits_for_update: dict[int, bool] = {}
        # What an argument has requested; None without one.
        self.requests_divided_update: bool | None = None
        self.divided_update: DividedUpdate | None = None
        # Whether a loss-scale optimizer around the divided one asks for the gradients first.
        self.is_scaled = False

    def __deepcopy__(self, memo: dict[int, Any]) -> GradientReducer:
        # A copy of the optimizer gets other gradients, none of which have been reduced.
        return GradientReducer(self.world, self.options)

    def install(self, optimizer: Any, requested: bool | None) -> None:
        """Reduce the gradients of an optimizer, and divide its updates among the ranks on request."""
        reducing = reducing_optimizer(optimizer)
        if _is_requested(requested):
            # The one inside of a loss-scale optimizer makes the updates.
            reducing = compat.with_inner(optimizer)[-1]
            self.is_scaled = reducing is not optimizer
        install(reducing, self)
        self.divide_updates(reducing, requested)

    def divide_updates(self, optimizer: Any, requested: bool | None) -> None:
        """Divide the updates of the optimizer among the ranks, if that is asked for and the result is the same."""
        self.requests_divided_update = requested
        if _is_requested(requested):
            adds_up = self.accumulates(optimizer)
            self.divided_update = divided_update(self.world, optimizer, self.options, adds_up)

    def stop_dividing_updates(self, reason: str) -> None:
        """Make all updates on each rank, after a message on the first one."""
        self.divided_update = None
        tell_undivided(self.world, reason)

    def begin(self, optimizer: Any, variables: Iterable) -> bool:
        """Make variables equal on all ranks before the first step that trains them.

        Return whether all ranks begin with the same values, as far as this call makes sure of it.
        """
        # Variables are compared until they are equal; audits find later differences.
        variables = list(variables)
        new = self._compared.others(variables)
        if new and can_compare():
            self._make_equal(optimizer, variables, new)
        return bool(self._compared) or not can_compare()

    def _make_equal(self, optimizer: Any, variables: list, new: list) -> None:
        level = logging.WARNING
        if self.has_own_batches:
            level = logging.INFO
        if compat.of_keras_3(optimizer):
            if not tf.executing_eagerly():
                # Slots that are made later would be made amid the step, where TensorFlow can't give them values first.
                compat.build_optimizer(optimizer, variables)
            # Variables that the optimizer trains later take part in the loss now.
            new = self._compared.others(
                compat.unique([*variables, *compat.variables_to_update(optimizer)])
            )
        # States are compared in their order: their names may have different numbers on each rank.
        states = compat.unique(compat.optimizer_variables(optimizer, variables))
        states = self._compared.others(states)
        self._has_compared = make_equal(self.world, new, level=level)
        if self._has_compared and make_equal(self.world, states, level=level):
            self._compared.note([*new, *states])

    # The road of gradients, from what the script or Keras calls down to the reduction: callers come before callees.

    def apply(
        self, optimizer: Any, apply_by_class: Callable, gradients: list, variables: list
    ) -> Any:
        """Apply gradients, reduced, by the method of the optimizer's class."""
        self.has_applied = True
        update = self.divided_update
        # Amid an update, the base class of an optimizer calls itself.
        if update is not None and self._applying is not optimizer:
            self.begin_divided(optimizer, variables)
            # Building it may show that it can't be divided.
            if self.divided_update is not None:
                return self._divided(update, optimizer, apply_by_class, gradients, variables)
        # Made equal before anything is reduced, so that the first update is the same on all ranks.
        self.begin(optimizer, variables)
        with self._iteration(optimizer):
            ready = self._reduced_or_accumulated(optimizer, gradients, variables)
            return self.apply_ready(optimizer, apply_by_class, ready, variables)

    def _iteration(self, optimizer: Any) -> contextlib.AbstractContextManager[None]:
        # Accumulated gradients are reduced in a branch of the graph, which is the iteration then.
        if self.accumulates(optimizer):
            return contextlib.nullcontext()
        return iteration()

    def apply_ready(self, optimizer: Any, apply_by_class: Callable, *ready: Any) -> Any:
        """Call a method of an optimizer with gradients that need no reduction, and the like."""
        # Restored, since calls nest: a loss-scale optimizer applies through its inner one.
        outer = self._applying
        # Gradients that come from now on are ready.
        self._applying = optimizer
        try:
            return apply_by_class(*ready)
        finally:
            self._applying = outer

    def _reduced_or_accumulated(
        self, optimizer: Any, gradients: list, variables: list, owners: Owners = None
    ) -> list[Gradient]:
        """Return what Keras is to apply: reduced gradients, or those that it accumulates on this rank."""
        if not self.accumulates(optimizer):
            return self._reduced_and_audited(optimizer, gradients, variables, owners)
        ready = gradients
        if reducing_optimizer(optimizer) is not optimizer:
            ready = self._all_finite_or_none(gradients)
        elif self._applying is not optimizer and not only_building.is_on:
            compat.build_optimizer(optimizer, variables)
            ready = accumulate(
                self.world,
                optimizer,
                self.contributions(optimizer, gradients),
                variables,
                functools.partial(self.over_ranks, optimizer, "mean"),
                self._waits_for_update,
                owners,
            )
        note_accumulators(self.world, reducing_optimizer(optimizer))
        self._audit_variables(optimizer, ready, variables)
        return ready

    def _reduced_and_audited(
        self, optimizer: Any, gradients: list, variables: list, owners: Owners = None
    ) -> list[Gradient]:
        """Return the reduced gradients, which are checked on request, and audit the variables if it is time."""
        reduced = self.reduce_once(optimizer, gradients, owners)
        self._audit_variables(optimizer, gradients, variables)
        as_they_are = all(map(operator.is_, gradients, reduced))
        is_off = environment.NPU_DEVICE_CHECK_GRADIENTS.get() != "on" or hasattr(
            optimizer, "inner_optimizer"
        )
        if as_they_are or is_off or not can_compare():
            return reduced
        steps = compat.steps_made(optimizer)
        return checked(self.world, steps, gradients, reduced, variables)

    def reduce_once(
        self, optimizer: Any, gradients: Sequence[Gradient], owners: Owners = None
    ) -> list[Gradient]:
        """Reduce gradients, but pass through those that ``reduce`` has just returned or that are being applied."""
        # Keras 3's ``apply_gradients`` calls ``apply``, which comes here once more.
        if self._applying is not None:
            return list(gradients)
        # A loss-scale optimizer reduces them first, and has its inner optimizer apply them later, if they are finite.
        origins = list(map(origin_of, dense_tensors(gradients)))
        if origins and all(getattr(source, _REDUCED_BY, None) == id(self) for source in origins):
            return list(gradients)
        return self.reduce(optimizer, gradients, owners)

    def reduce(
        self, optimizer: Any, gradients: Iterable[Gradient], owners: Owners = None
    ) -> list[Gradient]:
        """Return the gradients reduced over the ranks, ``None`` where ``None`` was."""
        gradients = list(gradients)
        reduction = self.options.reduction
        reduced = self.over_ranks(optimizer, reduction, gradients, owners)
        # Ranks of a group don't compare, as others may train something else.
        if self.world.group.name == WORLD_GROUP:
            self._pair = pair_of(gradients, reduced, reduction, self.world.size)
        self.mark_reduced(reduced)
        return reduced

    def over_ranks(
        self, optimizer: Any, reduction: str, gradients: Sequence[Gradient], owners: Owners = None
    ) -> list[Gradient]:
        """Return the sum, mean or the like of gradients over the ranks; see ``reduce_list``."""
        note_reduced(self.world, gradients)
        # Asked at each reduction, since a script may set clipnorm later.
        adds_rows = compat.adds_up_rows_first(optimizer)
        options = replace(self.options, reduction=reduction, adds_rows=adds_rows)
        return self.world.reduce(gradients, options, owners)

    def mark_reduced(self, reduced: Iterable[Gradient]) -> None:
        """Mark gradients as reduced: ``reduce_once`` passes them through, however often they come."""
        # Marked on the tensors, since a reference to them would keep them.
        for source in map(origin_of, dense_tensors(reduced)):
            setattr(source, _REDUCED_BY, id(self))

    def _audit_variables(self, optimizer: Any, gradients: Sequence, variables: Sequence) -> None:
        """Audit the variables if it is time."""
        # Only the outermost call is a step.
        if self._applying is not None or not can_compare():
            return
        self._audit = self._audit or Audit(self.world, not self._has_compared)
        updated = []
        for gradient, variable in zip(gradients, variables):
            if gradient is not None:
                updated.append(variable)
        self._audit.step(updated, optimizer, self._pair)
        self._pair = None

    # Divided updates, and loss-scale optimizers around them

    def _divided(
        self,
        update: DividedUpdate,
        optimizer: Any,
        apply_by_class: Callable,
        gradients: list,
        variables: list,
    ) -> Any:
        """Apply gradients by the optimizer whose updates are divided, or by a loss-scale optimizer around it."""
        apply_ready = functools.partial(self.apply_ready, optimizer, apply_by_class)
        if optimizer is not update.optimizer:
            if self.accumulates(optimizer):
                ready = self._reduced_or_accumulated(optimizer, gradients, variables)
            else:
                ready, _ = self.reduced_for_scale(optimizer, gradients, variables)
            return apply_ready(ready, variables)
        changes_variables = None
        if self.accumulates(optimizer):
            changes_variables = is_update(optimizer)
        reduce = functools.partial(self._reduced_or_accumulated, optimizer, gradients, variables)
        with self._iteration(optimizer):
            return update.apply(apply_ready, gradients, variables, reduce, changes_variables)

    def begin_divided(self, optimizer: Any, variables: list) -> None:
        """Build an optimizer whose updates are divided, and make it equal on all ranks before the first step."""
        update = self.divided_update
        if update is not None and self._applying is None:
            update.prepare(optimizer, variables)
            # Once slots are equal on all ranks, each is on one of them.
            update.part_if(self.begin(optimizer, variables))

    def reduced_for_scale(
        self, optimizer: Any, gradients: list, variables: list, audited: bool = True
    ) -> tuple[list, tf.Tensor]:
        """Return the gradients with which a loss-scale optimizer decides on a divided update as the others do, and
        whether those of all ranks are finite.

        Those of other ranks' variables are zeros of shape []. If any gradient isn't finite, one is NaN on each rank.

        Args:
            audited: audit the variables if it is time, unless the optimizer inside will.
        """
        update = self.divided_update
        assert update is not None
        with iteration():
            owners = update.owners(variables)
            if audited:
                reduced = self._reduced_and_audited(optimizer, gradients, variables, owners)
            else:
                reduced = self.reduce_once(optimizer, gradients, owners)
            agreed = self.agree(all_finite(reduced))
        ready = list(reduced)
        for position, gradient in enumerate(gradients):
            if gradient is not None and reduced[position] is None:
                ready[position] = tf.zeros([], gradient.dtype)
        return with_nan_unless(agreed, ready), agreed

    def ready_to_scale(self, optimizer: Any, gradients: list, variables: list) -> list | None:
        """Return the gradients of a divided update that tf-keras would add up over replicas: as they are in the update
        itself, and as ``reduced_for_scale`` for the loss-scale optimizer; and those that are to be added up first. None
        for any other caller.
        """
        if self.adds_up_first and self._applying is None:
            self.begin(optimizer, variables)
            return self._all_finite_or_none(gradients)
        if self.divided_update is None:
            return None
        if self._applying is not None:
            return gradients
        # A script that asks by itself gets all gradients.
        if not self.is_scaled:
            return None
        ready, _ = self.reduced_for_scale(optimizer, gradients, variables, audited=False)
        self.mark_reduced(ready)
        return ready

    # Accumulation, and gradients that may not be finite

    def accumulates(self, optimizer: Any) -> bool:
        """Return whether this rank accumulates the gradients of several steps, and the sum is reduced by a mean."""
        # Gradients that are to be checked or compared are reduced in each step.
        is_checked = environment.NPU_DEVICE_CHECK_GRADIENTS.get() == "on"
        if is_checked or compared_with_one_process.is_set():
            return False
        # A session's graph has no place for what is between two runs.
        return (
            compat.accumulation_steps(reducing_optimizer(optimizer)) > 1
            and tf.compat.v1.executing_eagerly_outside_functions()
            and tf.distribute.get_strategy().num_replicas_in_sync == 1
            and self.options.reduction in ("sum", "mean")
        )

    @property
    def factor_for_mean(self) -> int:
        """Return the factor of this rank's gradients by which a mean over the ranks is what is asked for."""
        if self.options.reduction == "sum":
            return self.world.size
        return 1

    def contributions(self, optimizer: Any, gradients: Sequence[Gradient]) -> list[Gradient]:
        """Return what this rank contributes to gradients: the mean over the ranks is the gradient of one process."""
        if self.factor_for_mean == 1:
            return list(gradients)
        return [weighted(gradient, self.factor_for_mean) for gradient in gradients]

    def agree(self, finite: tf.Tensor) -> tf.Tensor:
        """Return whether the gradients of all ranks are finite, given whether those of this one are: bool, shape []."""
        flag = tf.cast(finite, tf.int32)
        least = all_reduce(self.world.job, flag, "min", self.world.group)
        return tf.cast(least, tf.bool)

    def _all_finite_or_none(self, gradients: list) -> list:
        """Return gradients for a loss-scale optimizer: if those of a rank aren't finite, one isn't on any rank."""
        if self._applying is not None or all(gradient is None for gradient in gradients):
            return gradients
        return with_nan_unless(self.agree(all_finite(gradients)), gradients)


def _is_requested(argument: bool | None) -> bool:
    """Return whether updates are to be divided, given the argument of the script; it wins over the environment."""
    if argument is None:
        return environment.NPU_DEVICE_SHARD_OPTIMIZER.get() == "on"
    return argument
