"""Optimizers in a step of a replicated model: they add up gradients over the ranks, each weighted by its samples.

The weight is that of the loss or of the gradients, never of both:

- Keras's own step: ``scale_loss`` or ``minimize`` weights the loss, which costs nothing.
- A step of the script: its gradients are weighted when the optimizer reduces them.
- A step of the script that calls ``minimize`` of tf-keras: that weights the loss.

The way to the reduction: the optimizer's ``apply`` or ``apply_gradients`` (``optimizer_wrapper``), ``reduce_once``, and
``WeightedReduction.reduce``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from types import MethodType
from typing import Any

import tensorflow as tf

from npu_device._src import compat
from npu_device._src.gradients.reduction import Gradient, Owners, ReductionOptions, weighted
from npu_device._src.training.optimizers.optimizer_wrapper import GradientReduction, install
from npu_device._src.training.watching.schedule import is_only_building
from npu_device._src.training.watching.wrapped_optimizers import (
    REDUCTION,
    carrier,
    reduction_of,
)
from npu_device._src.world.current_step import CurrentStep, current_step, reduced_by_step
from npu_device._src.world.world import World


class WeightedReduction(GradientReduction):
    """Adds up the gradients of the ranks' shares of a batch; outside a step it takes the mean, as elsewhere.

    In a step, the reduction is a sum of weighted gradients, whatever the options are. A step of the script may reduce
    gradients itself, between the loss and the optimizer: so its loss isn't weighted.
    """

    def begin(self, optimizer: Any, variables: Iterable[Any]) -> None:
        """Make the ranks begin with the same variables, unless ``fit`` has done so."""
        if current_step() is None and not is_only_building():
            super().begin(optimizer, variables)

    def _has_equal_start(self) -> bool:
        return current_step() is not None or super()._has_equal_start()

    def reduce(
        self,
        optimizer: Any,
        gradients: Iterable[Gradient],
        owners: Owners = None,
    ) -> list[Gradient]:
        gradients = list(gradients)
        step = current_step()
        if step is None:
            if is_only_building():
                return gradients
            return super().reduce(optimizer, gradients, owners)
        # The script's own step has reduced them, or all that they are made of.
        if reduced_by_step(gradients):
            return gradients
        options = replace(self.options_for(optimizer), reduction="sum")
        parts = self.part_of(gradients, step, optimizer)
        reduced = self._world.reduce(parts, options, owners)
        self.remember(reduced)
        return reduced

    def parts(self, optimizer: Any, gradients: Sequence[Gradient]) -> list[Gradient]:
        step = current_step()
        if step is None:
            return super().parts(optimizer, gradients)
        if reduced_by_step(gradients):
            return list(gradients)
        return self.part_of(gradients, step, optimizer)

    def weight_in(self, step: CurrentStep, optimizer: Any) -> Any:
        """Return by what this rank counts in a step of an optimizer: in a sum over the ranks, or in a mean of parts."""
        weight = step.weight_for(self)
        is_mean = self.adds_up(optimizer) and not step.is_dry_run
        return weight * self._world.size if is_mean else weight

    def part_of(
        self, gradients: Sequence[Gradient], step: CurrentStep, optimizer: Any
    ) -> list[Gradient]:
        """Return what this rank contributes to the sum of the gradients of all ranks."""
        # The loss has passed through the optimizer, and got the weight there.
        is_weighted = self in step.weighing
        step.weighing.discard(self)
        if is_weighted:
            return list(gradients)
        weight = self.weight_in(step, optimizer)
        return [weighted(gradient, weight) for gradient in gradients]


def replicate_optimizer(optimizer: Any, world: World, shard_optimizer: bool | None = None) -> None:
    """Make an optimizer weight its gradients by their samples when it reduces them, and divide its updates among the
    ranks on request; it may be wrapped already.
    """
    reducer = carrier(optimizer)
    earlier = reduction_of(reducer)
    if earlier is not None and earlier.own_batches:
        raise ValueError(
            f"{type(optimizer).__name__} is a DistributedOptimizer of Horovod, with which each rank trains on a batch "
            "of its own, and replicate divides each batch among the ranks.\nWhat to do: use one of them. With "
            "replicate, take out the hvd calls, and let learning rate and steps be those of one process."
        )
    requests = {shard_optimizer, getattr(earlier, "requested_division", None)}
    if requests >= {True, False}:
        raise ValueError(
            f"{type(optimizer).__name__} is given shard_optimizer=True by one call and shard_optimizer=False by "
            "another one (DistributedOptimizer, replicate).\nWhat to do: pass the same value to both, or to one."
        )
    # Several models, or several calls of replicate, may share an optimizer.
    if isinstance(earlier, WeightedReduction):
        return
    keras = compat.keras_of(optimizer)
    reduction = WeightedReduction(world, getattr(earlier, "options", ReductionOptions("mean")))
    install(reducer, keras, reduction)
    # The slots that ranks hold stay where they are.
    reduction.division = getattr(earlier, "division", None)
    if reduction.division is not None:
        reduction.requested_division = True
    elif earlier is None or shard_optimizer:
        reduction.divide(reducer, shard_optimizer)
    # The optimizer itself is the one that gets the loss, also if the one inside reduces.
    if compat.is_keras_3(keras):
        optimizer.scale_loss = MethodType(_scale_loss, optimizer)
    else:
        optimizer.minimize = MethodType(_minimize, optimizer)


def _weighted_loss(optimizer: Any, loss: Any) -> Any:
    reduction = getattr(carrier(optimizer), REDUCTION)
    step = current_step()
    if step is None or not isinstance(reduction, WeightedReduction):
        return loss
    # Noted, so that its gradients don't get the weight once more.
    step.weighing.add(reduction)
    return loss * tf.cast(reduction.weight_in(step, optimizer), loss.dtype)


@tf.autograph.experimental.do_not_convert
def _scale_loss(self: Any, loss: Any) -> Any:
    scaled = type(self).scale_loss(self, loss)
    step = current_step()
    # Between the loss and the optimizer, a step of the script may reduce gradients itself.
    if step is not None and step.is_from_script:
        return scaled
    return _weighted_loss(self, scaled)


@tf.autograph.experimental.do_not_convert
def _minimize(
    self: Any, loss: Any, var_list: Any, *args: Any, tape: Any = None, **kwargs: Any
) -> Any:
    if tape is not None:
        kwargs["tape"] = tape
        if not callable(loss):
            # What is differentiated has to have the weight.
            with tape:
                loss = _weighted_loss(self, loss)
    return type(self).minimize(self, loss, var_list, *args, **kwargs)
