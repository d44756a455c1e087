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
from typing import TYPE_CHECKING, Any, Callable

import tensorflow as tf

from npu_device._src import compat
from npu_device._src.gradients.reduction import Gradient, ReductionOptions, weighted
from npu_device._src.training.optimizers.optimizer_wrapper import GradientReduction, install
from npu_device._src.training.watching.applied_gradients import REDUCTION, reduction_of
from npu_device._src.training.watching.schedule import is_only_building
from npu_device._src.world.current_step import CurrentStep, current_step, reduced_by_step
from npu_device._src.world.world import World

if TYPE_CHECKING:
    from npu_device._src.training.fit.start import Parts
    from npu_device._src.training.fit.step import Replaced


class Losses:
    """Stands in for the losses' ``call``, the layers' ``add_loss``, and in Keras 3 the model's ``compute_loss``."""

    def __init__(self, model: Any, parts: Parts, step: CurrentStep, world: World, replaced: Replaced) -> None:
        self._step = step
        self._world = world
        for loss in parts.losses:
            replaced.replace(loss, "call", partial(self._call, loss, loss.reduction))
            replaced.keep(loss, "reduction")
        for layer in parts.layers:
            if not compat.belongs_to_keras(type(layer)):
                replaced.replace(layer, "add_loss", self._add_loss)
        for layer in parts.regularized:
            replaced.replace(layer, "activity_regularizer", self._regularize)
        if compat.is_keras_3(compat.keras_of(model)):
            replaced.replace(model, "compute_loss", _compute_with_masks)

    def _call(self, loss: Any, reduction: Any, own: Callable[..., Any], y_true: Any, y_pred: Any) -> Any:
        values = own(y_true, y_pred)
        out_mask = getattr(values, "_keras_mask", None)  # by ignore_class
        given = getattr(y_pred, "_keras_mask", None), out_mask
        masks = [tf.cast(mask, tf.bool) for mask in given if mask is not None]
        mask = functools.reduce(tf.logical_and, masks) if masks else None
        loss.reduction = reduction
        denominator: Any = 1.0
        if reduction not in ("sum", "none", None):
            denominator = self._denominator(reduction, mask, values)
            if denominator is None:
                return values
            # Keras would divide by what is valid on this rank: perhaps by 0.
            loss.reduction = "sum"
        result = self._of_the_whole(values, denominator)
        if out_mask is not None:
            result._keras_mask = out_mask
        return result

    def _add_loss(self, own: Callable[..., Any], losses: Any, *args: Any, **kwargs: Any) -> Any:
        # Keras adds up what a layer gives; one value per sample is a sum over samples.
        return own(tf.nest.map_structure(self._if_per_sample, losses), *args, **kwargs)

    def _regularize(self, own: Callable[[Any], Any], outputs: Any) -> Any:
        return self._of_the_whole(own(outputs), 1.0)

    def _if_per_sample(self, loss: Any) -> Any:
        if not tf.is_tensor(loss) or not loss.shape.rank:
            return loss
        rows = self._step.share.rows
        if loss.shape[0] is not None and loss.shape[0] != rows:  # values of something else
            return loss
        return self._of_the_whole(loss, 1.0)

    def _of_the_whole(self, values: tf.Tensor, denominator: Any) -> tf.Tensor:
        """Return the terms of a sum that is divided by a denominator, so that the step's weight doesn't count twice."""
        weighed = tf.cast(denominator, tf.float64) * self._step.weight
        return values * tf.cast(tf.math.divide_no_nan(tf.constant(1.0, tf.float64), weighed), values.dtype)

    def _denominator(self, reduction: str, mask: tf.Tensor | None, values: tf.Tensor) -> tf.Tensor | None:
        """Return by what Keras would divide the sum over the whole batch; None for the number of values."""
        weights = self._sample_weights() if reduction == "mean_with_sample_weight" else None
        if weights is None and mask is None:
            return None
        if weights is None:
            per_step = tf.maximum(tf.size(values) / tf.size(mask), 1.0)  # values for each element of the mask
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
                "replicated model can't divide.\nWhat to do: use one weight per sample, or the reduction "
                "'sum_over_batch_size'."
            )
        return weights

    def _sum_of_all_ranks(self, each: tf.Tensor) -> tf.Tensor:
        return self._world.add_up(tf.reduce_sum(tf.cast(each, tf.float64)) * self._step.counts)


def _compute_with_masks(own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call Keras 3's ``compute_loss``, whose losses cast outputs of another dtype, which then have no mask any more."""
    bound = inspect.signature(own).bind(*args, **kwargs)
    if "y_pred" in bound.arguments:
        bound.arguments["y_pred"] = tf.nest.map_structure(_as_losses_cast, bound.arguments["y_pred"])
    return own(*bound.args, **bound.kwargs)


def _as_losses_cast(output: Any) -> Any:
    mask = getattr(output, "_keras_mask", None)
    if mask is not None and output.dtype.size < 4:
        output = tf.cast(output, tf.float32)
        output._keras_mask = mask
    return output


class Metrics:
    def __init__(self, parts: Parts, step: CurrentStep, world: World, replaced: Replaced) -> None:
        self._step = step
        self._world = world
        self._metrics = parts.metrics
        self._results: list[tuple[Any, Callable[[], Any]]] = []
        of_losses = set(map(id, parts.trackers))
        # tf-keras counts each loss of a sample as often as there are samples; Keras 3 their mean.
        self._counts_each = not compat.is_keras_3(compat.keras_of(parts.layers[0]))
        kinds = compat.keras_of(parts.layers[0]).metrics
        plain = (kinds.Mean.update_state, kinds.Sum.update_state)
        for metric in self._metrics:
            if _sees_everything(metric):
                replaced.replace(metric, "update_state", self._update_with_all_ranks)
            elif type(metric).update_state in plain:  # of numbers, which the step itself works out
                replaced.replace(metric, "update_state", partial(self._update_mean, id(metric) in of_losses))
            replaced.replace(metric, "result", self._record)
            replaced.replace(metric, "reset_state", partial(_refuse_reset, metric.name))

    def added_up(self) -> list[Any]:
        counted = [metric for metric in self._metrics if not _sees_everything(metric)]
        return list({id(variable): variable for metric in counted for variable in metric.variables}.values())

    def result_behind(self, value: Any) -> Callable[[], Any] | None:
        """Return a function that recomputes a value of the logs, if a metric's ``result`` gave it."""
        name = _name(value)
        for given, result in self._results:
            if given is value or (name is not None and name == _name(given)):
                return result
        return None

    def computed_from_results(self, logs: Any) -> list[str]:
        """Return the names of logs that a graph computes from results of metrics, which are this rank's own there."""
        given = {id(value) for value, _ in self._results}
        named = logs.items() if isinstance(logs, dict) else ()
        own = [(name, value) for name, value in named if tf.is_symbolic_tensor(value) and not self.result_behind(value)]
        return [str(name) for name, value in own if any(id(each) in given for each in compat.tensors_behind([value]))]

    def _record(self, result: Callable[[], Any]) -> Any:
        def part(key: Any) -> Callable[[], Any]:
            return lambda: result()[key]

        given = result()
        if isinstance(given, dict):
            self._results += [(value, part(key)) for key, value in given.items()]
        else:
            self._results.append((given, result))
        return given

    def _update_mean(self, is_tracker: bool, update: Callable[..., Any], values: Any, sample_weight: Any = None) -> Any:
        # A loss, for instance: one number for the whole batch, to which this rank contributes by its samples.
        tensor = compat.to_tensor(values) if isinstance(values, (int, float)) else tf.convert_to_tensor(values)
        weight = tf.cast(self._step.weight, tensor.dtype if tensor.dtype.is_floating else tf.float32)
        if tensor.shape.rank == 0:
            return update(values, sample_weight=weight if sample_weight is None else sample_weight)
        if is_tracker:  # a loss per sample, times what ``Losses`` has divided by
            if sample_weight is not None and self._counts_each:
                sample_weight = tf.math.divide_no_nan(tf.cast(sample_weight, weight.dtype), weight)
            return update(tensor * weight, sample_weight=sample_weight)
        return update(values, sample_weight=sample_weight)

    def _update_with_all_ranks(self, update: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        args, kwargs = tf.nest.map_structure(self._of_all_ranks, (args, kwargs))
        return update(*args, **kwargs)

    def _of_all_ranks(self, value: Any) -> Any:
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        tensor = tf.convert_to_tensor(value)
        if tensor.shape.rank == 0:
            mean = self._world.add_up(tf.cast(tensor, tf.float64) * self._step.weight)
            return tf.cast(mean, tensor.dtype)
        gathered = self._world.gather(self._step.share.counted(tensor))
        mask = getattr(value, "_keras_mask", None)
        if mask is not None:
            gathered._keras_mask = self._world.gather(self._step.share.counted(mask))
        return gathered


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
    return updating is compat.keras_of(metric).metrics.Metric or not compat.belongs_to_keras(updating)


def synchronise_normalisation(layers: Sequence[Any], step: CurrentStep, world: World, replaced: Replaced) -> None:
    """Replace the part of synchronised layers that computes mean and variance, while one step of a model runs."""
    for layer in layers:
        name = compat.moments_method(layer)
        if getattr(layer, "synchronized", False) and hasattr(layer, name):
            replaced.replace(layer, name, partial(moments, step, world, layer))


def moments(
    step: Any, world: World, layer: Any, own: Callable[..., Any], inputs: Any, *rest: Any, mask: Any = None
) -> Any:
    """Return mean and variance over all ranks, for a ``CurrentStep`` or what has its weights and exchanges."""
    del own
    # Keras 3 passes the mask; tf-keras passes the axes and whether to keep their dimensions.
    axes, keep = rest if len(rest) == 2 else (compat.reduction_axes(layer), False)
    mask = rest[0] if len(rest) == 1 else mask
    wide = tf.cast(inputs, tf.float32) if inputs.dtype.size < 4 else inputs
    if mask is None:
        part = tf.cast(step.weight, wide.dtype)
        mean, variance = tf.nn.moments(wide, list(axes), keepdims=keep)
    else:
        valid = tf.cast(mask, wide.dtype)
        count = tf.reduce_sum(valid) * tf.cast(step.counts, wide.dtype)
        part = tf.math.divide_no_nan(count, world.add_up(count))
        # Without a valid step, the moments of all steps, with part 0: else they would be NaN.
        steps = tf.where(tf.reduce_any(valid > 0), valid, tf.ones_like(valid))[..., tf.newaxis]
        mean, variance = tf.nn.weighted_moments(wide, list(axes), steps, keepdims=keep)

    def of_all_ranks(value: tf.Tensor) -> tf.Tensor:
        return step.exchanged(world.add_up(step.to_exchange(value * part)))

    common = of_all_ranks(mean)
    # Around the common mean: the difference of mean squares would lose digits.
    spread = of_all_ranks(variance + tf.square(mean - common))
    return tf.cast(common, inputs.dtype), tf.cast(spread, inputs.dtype)


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

    def reduce(self, optimizer: Any, gradients: Iterable[Gradient]) -> list[Gradient]:
        gradients, step = list(gradients), current_step()
        if step is None:
            return gradients if is_only_building() else super().reduce(optimizer, gradients)
        if reduced_by_step(gradients):
            return gradients
        reduced = self._world.reduce(self.part_of(gradients, step), replace(self.options_for(optimizer), kind="sum"))
        self.remember(reduced)
        return reduced

    def part_of(self, gradients: Sequence[Gradient], step: CurrentStep) -> list[Gradient]:
        is_weighted = self in step.weighing
        step.weighing.discard(self)
        return list(gradients) if is_weighted else [weighted(gradient, step.weight) for gradient in gradients]


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
    how = ReductionOptions("mean") if before is None else before.options
    install(carrier, keras, WeightedReduction(world, how))
    name, hook = ("scale_loss", _scale_loss) if compat.is_keras_3(keras) else ("minimize", _minimize)
    setattr(optimizer, name, MethodType(hook, optimizer))


def _carrier(optimizer: Any) -> Any:
    """Return the optimizer itself, or the one inside a loss-scale optimizer if that one has been wrapped."""
    inner = getattr(optimizer, "inner_optimizer", None)
    return inner if inner is not None and reduction_of(inner) is not None else optimizer


def _weighted_loss(optimizer: Any, loss: Any) -> Any:
    reduction, step = getattr(_carrier(optimizer), REDUCTION), current_step()
    if step is None or not isinstance(reduction, WeightedReduction):
        return loss
    step.weighing.add(reduction)
    return loss * tf.cast(step.weight, loss.dtype)


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
