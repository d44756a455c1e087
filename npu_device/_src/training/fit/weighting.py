"""What takes part in one step of a replicated model: losses, metrics, synchronised batch normalisation, optimizers.

The loss of each rank is reduced so that the losses of the ranks, weighted by their samples, are that of the whole
batch. A mean over samples needs no change. Sums, values per sample, means over the valid steps of masked sequences, and
means by sample weights have other denominators.

The state of Keras's own metrics adds up, see ``step.Increments``. The inputs of any other metric are gathered, so that
the metric of every rank sees the whole batch.

Optimizers add up gradients over the ranks, each weighted by its samples.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from types import MethodType
from typing import Any, Callable

import tensorflow as tf

from npu_device._src import compat
from npu_device._src.gradients.reduction import Gradient, ReductionOptions, weighted
from npu_device._src.training.distribute.normalization import Exchange, exchange_of_step, moments
from npu_device._src.training.fit.model_parts import ModelParts
from npu_device._src.training.fit.replaced import Replaced
from npu_device._src.training.optimizers.optimizer_wrapper import GradientReduction, install
from npu_device._src.training.watching.schedule import is_only_building
from npu_device._src.training.watching.wrapped_optimizers import (
    REDUCTION,
    carrier,
    reduction_of,
)
from npu_device._src.world.current_step import CurrentStep, current_step, reduced_by_step
from npu_device._src.world.world import World

LOSS, ADDED_LOSS, METRIC = "loss", "added loss", "metric"
"""How the names of numbers begin; see ``CurrentStep.is_sum``."""


class Losses:
    """Stands in for the losses' ``call``, the layers' ``add_loss``, and in Keras 3 the model's ``compute_loss``."""

    def __init__(
        self, model: Any, parts: ModelParts, step: CurrentStep, world: World, replaced: Replaced
    ) -> None:
        self._step = step
        self._world = world
        for place, loss in enumerate(parts.losses):
            replaced.replace(
                loss, "call", partial(self._call, f"{LOSS} {place}", loss, loss.reduction)
            )
            replaced.keep(loss, "reduction")
        for place, layer in enumerate(parts.layers):
            if not compat.belongs_to_keras(type(layer)) or compat.adds_loss_of_script(layer):
                replaced.replace(
                    layer, "add_loss", partial(self._add_loss, f"{ADDED_LOSS} {place}")
                )
        for layer in parts.regularized:
            replaced.replace(layer, "activity_regularizer", self._regularize)
        if compat.is_keras_3(compat.keras_of(model)):
            replaced.replace(model, "compute_loss", _compute_with_masks)

    def _call(
        self,
        name: str,
        loss: Any,
        reduction: Any,
        own: Callable[..., Any],
        y_true: Any,
        y_pred: Any,
    ) -> Any:
        values = own(y_true, y_pred)
        out_mask = getattr(values, "_keras_mask", None)  # by ignore_class
        given = getattr(y_pred, "_keras_mask", None), out_mask
        masks = [tf.cast(mask, tf.bool) for mask in given if mask is not None]
        mask = functools.reduce(tf.logical_and, masks) if masks else None
        loss.reduction = reduction
        denominator: Any = 1.0
        if reduction not in ("sum", "none", None):
            denominator = self._denominator(reduction, mask, values)
            if denominator is None and values.shape.rank == 0 and self._step.is_sum(name, values):
                return self._of_the_whole(
                    values, 1.0
                )  # of a function that adds up the samples itself
            if denominator is None:
                return values
            # Keras would divide by what is valid on this rank: perhaps by 0.
            loss.reduction = "sum"
        result = self._of_the_whole(values, denominator)
        if out_mask is not None:
            result._keras_mask = out_mask
        return result

    def _add_loss(
        self, name: str, own: Callable[..., Any], losses: Any, *args: Any, **kwargs: Any
    ) -> Any:
        # Keras adds up what a layer gives; one value per sample is a sum over samples.
        return own(tf.nest.map_structure(partial(self._if_a_sum, name), losses), *args, **kwargs)

    def _regularize(self, own: Callable[[Any], Any], outputs: Any) -> Any:
        return self._of_the_whole(own(outputs), 1.0)

    def _if_a_sum(self, name: str, loss: Any) -> Any:
        if not tf.is_tensor(loss):
            return loss
        if not loss.shape.rank:
            return self._of_the_whole(loss, 1.0) if self._step.is_sum(name, loss) else loss
        rows = self._step.share.rows
        if loss.shape[0] is not None and loss.shape[0] != rows:  # values of something else
            return loss
        return self._of_the_whole(loss, 1.0)

    def _of_the_whole(self, values: tf.Tensor, denominator: Any) -> tf.Tensor:
        """Return the terms of a sum that is divided by a denominator, so that the step's weight doesn't count twice."""
        weighed = tf.cast(denominator, tf.float64) * self._step.weight
        return values * tf.cast(
            tf.math.divide_no_nan(tf.constant(1.0, tf.float64), weighed), values.dtype
        )

    def _denominator(
        self, reduction: str, mask: tf.Tensor | None, values: tf.Tensor
    ) -> tf.Tensor | None:
        """Return by what Keras would divide the sum over the whole batch; None for the number of values."""
        weights = self._sample_weights() if reduction == "mean_with_sample_weight" else None
        if weights is None and mask is None:
            return None
        if weights is None:
            per_step = tf.maximum(
                tf.size(values) / tf.size(mask), 1.0
            )  # values for each element of the mask
            return tf.cast(per_step, tf.float64) * self._sum_of_all_ranks(mask)
        weights = tf.cast(weights, tf.float64)
        if mask is not None:
            while weights.shape.rank < mask.shape.rank:
                weights = weights[..., tf.newaxis]
            weights *= tf.cast(mask, tf.float64)
        return self._sum_of_all_ranks(weights)

    def _sample_weights(self) -> Any:
        data = self._step.share.data
        weights = data[2] if isinstance(data, (tuple, list)) and len(data) > 2 else None
        if tf.nest.is_nested(weights):
            raise ValueError(
                "a loss with reduction 'mean_with_sample_weight' was given sample weights for each output, which a "
                "replicated model can't divide.\nWhat to do: use the reduction 'sum_over_batch_size'."
            )
        return weights

    def _sum_of_all_ranks(self, each: tf.Tensor) -> tf.Tensor:
        return self._world.add_up(tf.reduce_sum(tf.cast(each, tf.float64)) * self._step.counts)


def _compute_with_masks(own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call Keras 3's ``compute_loss``, whose losses cast outputs of another dtype, which then have no mask any more."""
    bound = inspect.signature(own).bind(*args, **kwargs)
    if "y_pred" in bound.arguments:
        bound.arguments["y_pred"] = tf.nest.map_structure(
            _as_losses_cast, bound.arguments["y_pred"]
        )
    return own(*bound.args, **bound.kwargs)


def _as_losses_cast(output: Any) -> Any:
    mask = getattr(output, "_keras_mask", None)
    if mask is not None and output.dtype.size < 4:
        output = tf.cast(output, tf.float32)
        output._keras_mask = mask
    return output


class Metrics:
    def __init__(
        self, parts: ModelParts, step: CurrentStep, world: World, replaced: Replaced
    ) -> None:
        self._step = step
        self._world = world
        self._metrics = parts.metrics
        self._results: list[tuple[Any, Callable[[], Any]]] = []
        self.settle: Callable[[], None]  # gives the metrics the increments of all ranks so far
        of_losses = set(map(id, parts.trackers))
        # tf-keras counts each loss of a sample as often as there are samples; Keras 3 their mean.
        self._counts_each = not compat.is_keras_3(compat.keras_of(parts.layers[0]))
        kinds = compat.keras_of(parts.layers[0]).metrics
        plain = (
            kinds.Mean.update_state,
            kinds.Sum.update_state,
        )  # of numbers, which the step itself works out
        for place, metric in enumerate(self._metrics):
            name = f"{METRIC} {place}"
            if _sees_everything(metric):
                replaced.replace(metric, "update_state", partial(self._update_with_all_ranks, name))
            elif type(metric).update_state in plain:
                weigh = (
                    self._weight_in_sum if isinstance(metric, kinds.Sum) else self._weight_in_mean
                )
                replaced.replace(
                    metric,
                    "update_state",
                    partial(self._update, name, weigh, id(metric) in of_losses),
                )
            replaced.replace(metric, "result", self._record)
            replaced.replace(metric, "reset_state", partial(_refuse_reset, metric.name))

    def added_up(self) -> list[Any]:
        counted = [metric for metric in self._metrics if not _sees_everything(metric)]
        return list(
            {id(variable): variable for metric in counted for variable in metric.variables}.values()
        )

    def results_again(self, values: Sequence[Any]) -> tuple[list[Any], list[int]]:
        """Return what of the logs is a metric's result, or a graph computes from some, with the results of all ranks.

        Other values are None. The second list has the places of those that can't be computed again.
        """
        found: list[Any] = []
        lost = []
        for place, value in enumerate(values):
            name = _name(value)
            own = [
                result
                for given, result in self._results
                if given is value or (name and name == _name(given))
            ]
            again = own[0]() if own else None
            if not own and tf.is_symbolic_tensor(value):
                behind = {each.name for each in compat.tensors_behind([value])}
                used = {
                    given.name: result
                    for given, result in self._results
                    if getattr(given, "name", "") in behind
                }
                again = compat.computed_again(
                    value, {name: result() for name, result in used.items()}
                )
                lost += [place] if used and again is None else []
            found.append(again)
        return found, lost

    def _record(self, result: Callable[[], Any]) -> Any:
        def part(key: Any) -> Callable[[], Any]:
            return lambda: result()[key]

        if tf.executing_eagerly() and self._step.is_from_script:
            self.settle()  # no graph tells later what the step has computed from it
        given = result()
        if isinstance(given, dict):
            self._results += [(value, part(key)) for key, value in given.items()]
        else:
            self._results.append((given, result))
        return given

    def _update(
        self, name: str, weigh: Any, is_tracker: bool, update: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Update a ``Mean`` or ``Sum``: the ranks' increments are added up, as far as they have samples."""
        are_sums = numbers_given(self._step, name, args, kwargs)
        values, sample_weight = _values_and_weight(*args, **kwargs)
        tensor = (
            compat.to_tensor(values)
            if isinstance(values, (int, float))
            else tf.convert_to_tensor(values)
        )
        weight = tf.cast(
            self._step.weight, tensor.dtype if tensor.dtype.is_floating else tf.float32
        )
        if tensor.shape.rank == 0:
            is_sum, weight_is_sum = _values_and_weight(*are_sums[0], **are_sums[1])
            values, sample_weight = weigh(values, sample_weight, is_sum, weight_is_sum, weight)
        elif is_tracker:  # a loss per sample, times what ``Losses`` has divided by
            if sample_weight is not None and self._counts_each:
                sample_weight = tf.math.divide_no_nan(tf.cast(sample_weight, weight.dtype), weight)
            values = tensor * weight
        return update(values, sample_weight=sample_weight)

    def _weight_in_mean(
        self,
        number: Any,
        sample_weight: Any,
        is_sum: bool | None,
        weight_is_sum: bool | None,
        part: tf.Tensor,
    ) -> tuple[Any, Any]:
        # A loss, for instance: one number for the whole batch, to which this rank contributes by its samples.
        if is_sum:
            number = tf.math.divide_no_nan(tf.cast(number, part.dtype), part)
        if sample_weight is None:
            return number, part
        return number, _weighted(sample_weight, part) if weight_is_sum is False else sample_weight

    def _weight_in_sum(
        self,
        number: Any,
        sample_weight: Any,
        is_sum: bool | None,
        weight_is_sum: bool | None,
        part: tf.Tensor,
    ) -> tuple[Any, Any]:
        is_mean = is_sum is False and (sample_weight is None or weight_is_sum is False)
        return number, _weighted(sample_weight, part) if is_mean else sample_weight

    def _update_with_all_ranks(
        self, name: str, update: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        are_sums = numbers_given(self._step, name, args, kwargs)
        args, kwargs = tf.nest.map_structure(self._of_all_ranks, (args, kwargs), are_sums)
        return update(*args, **kwargs)

    def _of_all_ranks(self, value: Any, is_sum: bool | None) -> Any:
        if value is None or (isinstance(value, (bool, int, float, str)) and not is_sum):
            return value
        tensor = tf.convert_to_tensor(value)
        if tensor.shape.rank == 0:
            part = self._step.counts if is_sum else self._step.weight
            total = self._world.add_up(tf.cast(tensor, tf.float64) * part)
            return tf.cast(total, tensor.dtype)
        gathered = self._world.gather(self._step.share.counted(tensor))
        mask = getattr(value, "_keras_mask", None)
        if mask is not None:
            gathered._keras_mask = self._world.gather(self._step.share.counted(mask))
        return gathered


def numbers_given(step: CurrentStep, name: str, args: Any, kwargs: Any) -> Any:
    """Return for each argument of a metric's ``update_state`` if it is a sum over the samples; None if unknown."""
    return tf.nest.map_structure(partial(step.is_sum, name), (args, kwargs))


def note_numbers(step: CurrentStep, metrics: Sequence[Any], replaced: Replaced) -> None:
    """Have a step note the numbers that it gives to metrics, and nothing else."""

    def note(name: str, update: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        numbers_given(step, name, args, kwargs)
        return update(*args, **kwargs)

    for place, metric in enumerate(metrics):
        replaced.replace(metric, "update_state", partial(note, f"{METRIC} {place}"))


def _values_and_weight(values: Any, sample_weight: Any = None) -> tuple[Any, Any]:
    return values, sample_weight


def _weighted(sample_weight: Any, part: tf.Tensor) -> tf.Tensor:
    return part if sample_weight is None else tf.cast(sample_weight, part.dtype) * part


def _refuse_reset(name: str, reset: Callable[[], None]) -> None:
    del reset
    raise RuntimeError(
        f"a step of a replicated model called reset_state of its metric {name!r}; the increments that all ranks have "
        "made in the step could not be added up then.\nWhat to do: reset it between steps, in a callback."
    )


def _name(value: Any) -> str | None:
    """Return the name of the tensor of a graph, behind the identities through which AutoGraph returns values."""
    if not isinstance(value, tf.Tensor) or tf.executing_eagerly():
        return None
    while value.op.type == "Identity":
        value = value.op.inputs[0]
    return str(value.name)


def _sees_everything(metric: Any) -> bool:
    """Return True for a metric whose state may not add up: its own class or function computes it, not Keras's."""
    function = compat.function_of_metric(metric)
    if function is not None:
        return not compat.belongs_to_keras(function)
    updating = next(cls for cls in type(metric).__mro__ if "update_state" in vars(cls))
    return updating is compat.keras_of(metric).metrics.Metric or not compat.belongs_to_keras(
        updating
    )


def synchronise_normalisation(
    layers: Sequence[Any], step: CurrentStep, world: World, replaced: Replaced
) -> None:
    """Replace the part of synchronised layers that computes mean and variance, while one step of a model runs."""
    exchange = exchange_of_step(step, world.add_up)
    for layer in layers:
        name = compat.moments_method(layer)
        if getattr(layer, "synchronized", False) and hasattr(layer, name):
            replaced.replace(layer, name, partial(_moments, exchange, step.counts, layer))


def _moments(
    exchange: Exchange, counts: Any, layer: Any, own: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    del own
    return moments(exchange, counts, layer, *args, **kwargs)


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

    def _has_equal_start(self) -> bool:
        return current_step() is not None or super()._has_equal_start()

    def reduce(
        self,
        optimizer: Any,
        gradients: Iterable[Gradient],
        owners: Sequence[int] | None = None,
    ) -> list[Gradient]:
        gradients, step = list(gradients), current_step()
        if step is None:
            if is_only_building():
                return gradients
            return super().reduce(optimizer, gradients, owners)
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
        is_weighted = self in step.weighing
        step.weighing.discard(self)
        weight = self.weight_in(step, optimizer)
        return (
            list(gradients)
            if is_weighted
            else [weighted(gradient, weight) for gradient in gradients]
        )


def replicate_optimizer(optimizer: Any, world: World, shard_optimizer: bool = False) -> None:
    """Make an optimizer weight its gradients by their samples when it reduces them, and divide its updates among the
    ranks on request; it may be wrapped already.
    """
    reducing = carrier(optimizer)
    before = reduction_of(reducing)
    if before is not None and before.own_batches:
        raise ValueError(
            f"{type(optimizer).__name__} is a DistributedOptimizer of Horovod, with which each rank trains on a batch "
            "of its own, and replicate divides each batch among the ranks.\nWhat to do: use one of them. With "
            "replicate, take out the hvd calls, and let learning rate and steps be those of one process."
        )
    if isinstance(before, WeightedReduction):
        return
    keras = compat.keras_of(optimizer)
    how = ReductionOptions("mean") if before is None else before.options
    reduction = WeightedReduction(world, how)
    install(reducing, keras, reduction)
    if before is not None and before.division is not None:
        reduction.division = before.division
    elif shard_optimizer:
        reduction.divide(reducing)
    name, hook = (
        ("scale_loss", _scale_loss) if compat.is_keras_3(keras) else ("minimize", _minimize)
    )
    setattr(optimizer, name, MethodType(hook, optimizer))


def _weighted_loss(optimizer: Any, loss: Any) -> Any:
    reduction, step = getattr(carrier(optimizer), REDUCTION), current_step()
    if step is None or not isinstance(reduction, WeightedReduction):
        return loss
    step.weighing.add(reduction)
    return loss * tf.cast(reduction.weight_in(step, optimizer), loss.dtype)


@tf.autograph.experimental.do_not_convert
def _scale_loss(self: Any, loss: Any) -> Any:
    loss, step = type(self).scale_loss(self, loss), current_step()
    return loss if step is not None and step.is_from_script else _weighted_loss(self, loss)


@tf.autograph.experimental.do_not_convert
def _minimize(
    self: Any, loss: Any, var_list: Any, *args: Any, tape: Any = None, **kwargs: Any
) -> Any:
    if tape is not None:
        kwargs["tape"] = tape
        if not callable(loss):
            with tape:
                loss = _weighted_loss(self, loss)
    return type(self).minimize(self, loss, var_list, *args, **kwargs)
