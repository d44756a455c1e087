"""Optimizers of a replicated model: gradients are added up over the ranks, each weighted by its samples."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from types import MethodType
from typing import Any

import tensorflow as tf

from npu_device._src import compat
from npu_device._src.gradients.reduction import Gradient, ReductionOptions, reduce_list
from npu_device._src.gradients.sparse import weighted
from npu_device._src.training.applied_gradients import REDUCTION, reduction_of
from npu_device._src.training.fit.current import CurrentStep, current_step, reduced_by_step
from npu_device._src.training.optimizer_wrapper import GradientReduction, install, with_rows_for
from npu_device._src.training.schedule import is_only_building
from npu_device._src.training.world import World


class WeightedReduction(GradientReduction):
    """Adds up the gradients of the ranks' shares of a batch; outside a step it takes the mean, as elsewhere.

    Weighting the loss costs nothing; gradients are weighted themselves only if the loss didn't pass through the
    optimizer. In a script's own step only ``minimize`` weights the loss: between the loss and the optimizer, the step
    may reduce gradients itself.
    """

    def begin(self, optimizer: Any, variables: Iterable[Any]) -> None:
        """Make the ranks begin with the same variables, unless ``fit`` has done so."""
        if current_step() is None and not is_only_building():
            super().begin(optimizer, variables)

    def reduce(self, gradients: Iterable[Gradient]) -> list[Gradient]:
        gradients, step = list(gradients), current_step()
        if step is None:
            return gradients if is_only_building() else super().reduce(gradients)
        if reduced_by_step(gradients):
            return gradients
        gradients = self.part_of(gradients, step)
        how = replace(self.options, kind="sum")
        reduced = reduce_list(self._world.job, gradients, how, self._world.group)
        self.remember(reduced)
        return reduced

    def part_of(self, gradients: Sequence[Gradient], step: CurrentStep) -> list[Gradient]:
        is_weighted = self in step.weighing
        step.weighing.discard(self)
        return list(gradients) if is_weighted else [weighted(gradient, step.weight) for gradient in gradients]

    def weighted_loss(self, loss: Any) -> Any:
        step = current_step()
        if step is None:
            return loss
        step.weighing.add(self)
        return loss * tf.cast(step.weight, loss.dtype)


def replicate_optimizer(optimizer: Any, world: World) -> None:
    """Make an optimizer weight its gradients by their samples when it reduces them; it may be wrapped already."""
    carrier = _carrier(optimizer)
    before = reduction_of(carrier)
    if before is not None and before.own_batches:
        raise ValueError(
            f"{type(optimizer).__name__} is a DistributedOptimizer of Horovod, with which each rank trains on a batch "
            "of its own, and replicate divides each batch among the ranks.\nWhat to do: use one of them. With "
            "replicate, take out the hvd calls, and let learning rate and steps be those of one process."
        )
    if isinstance(before, WeightedReduction):
        return
    keras = compat.keras_of(optimizer)
    how = with_rows_for(keras, ReductionOptions("mean")) if before is None else before.options
    install(carrier, keras, WeightedReduction(world, how))
    name, hook = ("scale_loss", _scale_loss) if compat.is_keras_3(keras) else ("minimize", _minimize)
    setattr(optimizer, name, MethodType(hook, optimizer))


def _carrier(optimizer: Any) -> Any:
    """Return the optimizer itself, or the one inside a loss-scale optimizer if that one has been wrapped."""
    inner = getattr(optimizer, "inner_optimizer", None)
    return inner if inner is not None and reduction_of(inner) is not None else optimizer


def _weighted_loss(optimizer: Any, loss: Any) -> Any:
    reduction = getattr(_carrier(optimizer), REDUCTION)
    return reduction.weighted_loss(loss) if isinstance(reduction, WeightedReduction) else loss


@tf.autograph.experimental.do_not_convert
def _scale_loss(self: Any, loss: Any) -> Any:
    loss, step = type(self).scale_loss(self, loss), current_step()
    return loss if step is not None and step.is_scripts else _weighted_loss(self, loss)


@tf.autograph.experimental.do_not_convert
def _minimize(self: Any, loss: Any, var_list: Any, *args: Any, tape: Any = None, **kwargs: Any) -> Any:
    if tape is not None:
        kwargs["tape"] = tape
        if not callable(loss):
            with tape:
                loss = _weighted_loss(self, loss)
    return type(self).minimize(self, loss, var_list, *args, **kwargs)
