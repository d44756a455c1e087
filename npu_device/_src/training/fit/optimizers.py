"""Optimizers of a replicated model: gradients are added up over the ranks, each weighted by its samples."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import replace
from types import MethodType
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from npu_device._src import compat
from npu_device._src.gradients.reduction import Gradient, ReductionOptions, reduce_list
from npu_device._src.gradients.sparse import weighted
from npu_device._src.training import keras_hooks
from npu_device._src.training.fit.current import current_step
from npu_device._src.training.fit.reduced_by_step import reduced_by_step
from npu_device._src.training.fit.share import Share
from npu_device._src.training.optimizer_wrapper import GradientReduction, with_rows_for
from npu_device._src.training.world import World

if TYPE_CHECKING:
    from npu_device._src.training.fit.replica import Replica


class WeightedReduction(GradientReduction):
    """Adds up the gradients of the ranks' shares of a batch; outside a step it takes the mean, as elsewhere.

    Weighting the loss costs nothing; gradients are weighted themselves only if the loss didn't pass through the
    optimizer. In a script's own step only ``minimize`` weights the loss: between the loss and the optimizer, the step
    may reduce gradients itself.
    """

    def __init__(self, world: World, options: ReductionOptions, replica: Replica) -> None:
        super().__init__(world, options)
        self._replicas = weakref.WeakSet([replica])
        self.loss_is_weighted = False

    def serve(self, replica: Replica) -> None:
        """Take part in the steps of another model, too."""
        self._replicas.add(replica)

    def _share(self) -> Share | None:
        shares = (replica.share() for replica in self._replicas)
        return next((share for share in shares if share is not None), None)

    def _is_fits(self) -> bool:
        return any(replica.is_fits() for replica in self._replicas)

    def begin(self, optimizer: Any, variables: Iterable[Any]) -> None:
        """Make the ranks begin with the same variables, unless ``fit`` has done so."""
        if not self._is_fits():
            super().begin(optimizer, variables)

    def reduce(self, gradients: Iterable[Gradient]) -> list[Gradient]:
        """Return the gradient of the whole batch."""
        gradients, share = list(gradients), self._share()
        if share is None:
            return gradients if self._is_fits() else super().reduce(gradients)
        if reduced_by_step(gradients):
            return gradients
        if not self.loss_is_weighted:
            gradients = [weighted(gradient, share.weight) for gradient in gradients]
        self.loss_is_weighted = False
        how = replace(self.options, kind="sum")
        reduced = reduce_list(self._world.runtime, gradients, how, self._world.group)
        self._remember(reduced)
        return reduced

    def weighted_loss(self, loss: Any) -> Any:
        """Return the loss as it counts in the loss of the whole batch."""
        share = self._share()
        if share is None:
            return loss
        self.loss_is_weighted = True
        return loss * tf.cast(share.weight, loss.dtype)


def replicate_optimizer(optimizer: Any, world: World, replica: Replica) -> None:
    """Make an optimizer weight its gradients by their samples when it reduces them; it may be wrapped already."""
    carrier = _carrier(optimizer)
    before = keras_hooks.reduction_of(carrier)
    if isinstance(before, WeightedReduction):
        before.serve(replica)
        return
    keras = compat.keras_of(optimizer)
    how = with_rows_for(keras, ReductionOptions("mean")) if before is None else before.options
    keras_hooks.install(carrier, keras, WeightedReduction(world, how, replica))
    name, hook = ("scale_loss", _scale_loss) if compat.is_keras_3(keras) else ("minimize", _minimize)
    setattr(optimizer, name, MethodType(hook, optimizer))


def _carrier(optimizer: Any) -> Any:
    """Return the optimizer itself, or the one inside a loss-scale optimizer if that one has been wrapped."""
    inner = getattr(optimizer, "inner_optimizer", None)
    return inner if inner is not None and keras_hooks.reduction_of(inner) is not None else optimizer


def loss_is_weighted(optimizer: Any) -> bool:
    """Return True once an optimizer has multiplied a step's loss by this rank's part of the samples."""
    reduction = keras_hooks.reduction_of(_carrier(optimizer))
    return isinstance(reduction, WeightedReduction) and reduction.loss_is_weighted


def _weighted_loss(optimizer: Any, loss: Any) -> Any:
    reduction = keras_hooks.reduction_of(_carrier(optimizer))
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
