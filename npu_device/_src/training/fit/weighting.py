"""Optimizers in a step of a replicated model: they sum gradients over the ranks, each rank's times its fraction of
the samples.

The loss gets the factor, or the gradients do, never both:

- Keras's own step: ``scale_loss`` or ``minimize`` multiplies the loss, which costs nothing.
- A custom step, written by the script: its gradients are multiplied when the optimizer reduces them.
- A custom step that calls ``minimize`` of tf-keras: that multiplies the loss.

The way to the reduction: the optimizer's ``apply`` or ``apply_gradients`` (``reducing_methods``),
``GradientReducer.apply``, ``reduce_once``, and ``WeightedReducer.reduce``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import MethodType
from typing import Any

import tensorflow as tf

from npu_device._src import compat
from npu_device._src.gradients.reduction import Gradient, Owners, ReductionOptions, weighted
from npu_device._src.training.optimizers.optimizer_wrapper import GradientReducer
from npu_device._src.training.watching.schedule import only_building
from npu_device._src.training.watching.wrapped_optimizers import (
    REDUCER,
    reducer_of,
    reducing_optimizer,
)
from npu_device._src.world.current_step import CurrentStep, current_step, reduced_by_step
from npu_device._src.world.world import World


class WeightedReducer(GradientReducer):
    """Sums the gradients of the ranks' shares of a batch; outside a step it takes the mean, as elsewhere.

    In a step, the reduction is a sum of weighted gradients, whatever the options are. A custom step may reduce
    gradients itself, between the loss and the optimizer: so its loss isn't multiplied.
    """

    def begin(self, optimizer: Any, variables: Iterable) -> bool:
        """Make the ranks begin with the same variables, unless ``fit`` has done so."""
        return current_step() is not None or super().begin(optimizer, variables)

    def reduce(
        self, optimizer: Any, gradients: Iterable[Gradient], owners: Owners = None
    ) -> list[Gradient]:
        gradients = list(gradients)
        step = current_step()
        if step is None:
            if only_building.is_on:
                return gradients
            return super().reduce(optimizer, gradients, owners)
        # A custom step has reduced them already, or all that they are made of.
        if reduced_by_step(gradients):
            return gradients
        contributions = self.weighted_once(gradients, step, optimizer)
        # Unlike the base class, this keeps no pair for ``same_samples``: ``fit`` compares the batches themselves.
        reduced = self.over_ranks(optimizer, "sum", contributions, owners)
        self.mark_reduced(reduced)
        return reduced

    def contributions(self, optimizer: Any, gradients: Sequence[Gradient]) -> list[Gradient]:
        step = current_step()
        if step is None:
            return super().contributions(optimizer, gradients)
        if reduced_by_step(gradients):
            return list(gradients)
        return self.weighted_once(gradients, step, optimizer)

    def gradient_factor(self, step: CurrentStep, optimizer: Any) -> Any:
        """Return the factor of this rank's gradients, or of their loss, in the reduction: see ``CurrentStep``."""
        factor = step.fraction
        if self in step.sums.reducers:
            factor = step.sum_factor
        # Accumulated gradients are reduced by a mean (``_reduced_or_accumulated``). The first-step check takes each
        # step's gradients.
        is_mean = self.accumulates(optimizer) and not step.is_dry_run
        if is_mean:
            return factor * self.world.size
        return factor

    def weighted_once(
        self, gradients: Sequence[Gradient], step: CurrentStep, optimizer: Any
    ) -> list[Gradient]:
        """Return this rank's gradients times its factor, unless their loss has been multiplied by it."""
        is_weighted = self in step.with_weighted_loss
        # A later call in the step may bring gradients of a loss that wasn't multiplied.
        step.with_weighted_loss.discard(self)
        if is_weighted:
            return list(gradients)
        factor = self.gradient_factor(step, optimizer)
        return [weighted(gradient, factor) for gradient in gradients]


def replicate_optimizer(optimizer: Any, world: World, shard_optimizer: bool | None = None) -> None:
    """Make an optimizer weight its gradients by their samples when it reduces them, and divide its updates among the
    ranks on request; it may be wrapped already.
    """
    carrying = reducing_optimizer(optimizer)
    earlier = reducer_of(carrying)
    if earlier is not None and earlier.has_own_batches:
        raise ValueError(
            f"{type(optimizer).__name__} is a DistributedOptimizer of Horovod, with which each rank trains on a batch "
            "of its own, and replicate divides each batch among the ranks.\nWhat to do: use one of them. With "
            "replicate, take out the hvd calls, and let learning rate and steps be those of one process."
        )
    # True from one call and False from another one contradict each other; None asks for nothing.
    requests = {shard_optimizer, getattr(earlier, "requests_divided_update", None)}
    if requests >= {True, False}:
        raise ValueError(
            f"{type(optimizer).__name__} is given shard_optimizer=True by one call and shard_optimizer=False by "
            "another one (DistributedOptimizer, replicate).\nWhat to do: pass the same value to both, or to one."
        )
    # Several models, or several calls of replicate, may share an optimizer.
    if isinstance(earlier, WeightedReducer):
        return
    reducer = WeightedReducer(world, getattr(earlier, "options", ReductionOptions("mean")))
    if earlier is None:
        reducer.install(optimizer, shard_optimizer)
    else:
        setattr(carrying, REDUCER, reducer)
        # An update that is divided already goes on, with the slots on the ranks that hold them.
        reducer.divided_update = earlier.divided_update
        reducer.is_scaled = earlier.is_scaled
        if reducer.divided_update is not None:
            reducer.requests_divided_update = True
        elif shard_optimizer:
            reducer.divide_updates(carrying, shard_optimizer)
    # Hooked on the outer optimizer, since that gets the loss, also if the one inside reduces.
    if compat.of_keras_3(optimizer):
        optimizer.scale_loss = MethodType(_scale_loss, optimizer)
    else:
        optimizer.minimize = MethodType(_minimize, optimizer)


def _weighted_loss(optimizer: Any, loss: Any) -> Any:
    reducer = getattr(reducing_optimizer(optimizer), REDUCER)
    step = current_step()
    if step is None or not isinstance(reducer, WeightedReducer):
        return loss
    # Noted, so that its gradients aren't multiplied once more.
    step.with_weighted_loss.add(reducer)
    return loss * tf.cast(reducer.gradient_factor(step, optimizer), loss.dtype)


@compat.do_not_convert
def _scale_loss(self: Any, loss: Any) -> Any:
    scaled = type(self).scale_loss(self, loss)
    step = current_step()
    # Unweighted in a custom step, which may reduce gradients itself between the loss and the optimizer.
    if step is not None and step.is_custom:
        return scaled
    return _weighted_loss(self, scaled)


@compat.do_not_convert
def _minimize(
    self: Any, loss: Any, var_list: Any, *args: Any, tape: Any = None, **kwargs: Any
) -> Any:
    if tape is not None:
        kwargs["tape"] = tape
        if not callable(loss):
            # On the tape, since the loss that is differentiated has to have the factor.
            with tape:
                loss = _weighted_loss(self, loss)
    return type(self).minimize(self, loss, var_list, *args, **kwargs)
