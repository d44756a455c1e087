"""Metrics in a step of a replicated model: on every rank they get the values of the whole batch.

The increments of Keras's own metrics are summed, see ``step.Increments``. The inputs of any other metric are gathered,
so that the metric of every rank sees the whole batch; also those of functions of Keras that don't give one value for
each sample (``metric_functions``).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Callable, NamedTuple

import tensorflow as tf

from npu_device._src import compat
from npu_device._src.training.fit.metric_functions import gives_values_of_samples
from npu_device._src.training.fit.model_objects import ModelObjects
from npu_device._src.training.fit.replaced import Replaced
from npu_device._src.world.current_step import CurrentStep

METRIC = "metric"
"""How the names of numbers given to metrics begin; see ``CurrentStep.register_number``."""


class _Result(NamedTuple):
    """A result that a step has asked a metric for; ``compute`` returns it again, with the updates of all ranks."""

    tensor: Any
    compute: Callable[[], Any]


class Metrics:
    """Stands in for ``update_state``, ``result`` and ``reset_state`` of metrics.

    Args:
        reduce_increments: gives the metrics the increments of all ranks so far.
    """

    def __init__(
        self,
        objects: ModelObjects,
        step: CurrentStep,
        replaced: Replaced,
        reduce_increments: Callable,
    ) -> None:
        self._step = step
        self._reduce_increments = reduce_increments
        self._metrics = objects.metrics
        self._results: list[_Result] = []
        keras = compat.keras_of(objects.layers[0])
        # In tf-keras, the losses of samples count by their number; in Keras 3, their mean counts as one.
        self._counts_losses = not compat.is_keras_3(keras)
        trackers = set(map(id, objects.trackers))
        for index, metric in enumerate(self._metrics):
            is_tracker = id(metric) in trackers
            update = self._update_of(metric, keras.metrics, f"{METRIC} {index}", is_tracker)
            if update is not None:
                replaced.replace(metric, "update_state", update)
            replaced.replace(metric, "result", self._record)
            replaced.replace(metric, "reset_state", partial(_refuse_reset, metric.name))

    def _update_of(self, metric: Any, classes: Any, name: str, is_tracker: bool) -> Callable | None:
        """Return what stands in for ``update_state``; None where increments are simply summed."""
        if _needs_whole_batch(metric):
            return partial(self._update_with_all_ranks, name)
        if compat.function_of_metric(metric) is not None:
            return partial(self._update_by_function, name, metric)
        # A metric of another class gets numbers that the step itself has worked out.
        if type(metric).update_state not in (classes.Mean.update_state, classes.Sum.update_state):
            return None
        is_mean = not isinstance(metric, classes.Sum)
        return partial(self._update_by_share, name, is_mean, is_tracker)

    def additive_variables(self) -> list:
        """Return the variables of metrics whose increments are summed over the ranks."""
        additive = [metric for metric in self._metrics if not _needs_whole_batch(metric)]
        variables = [variable for metric in additive for variable in metric.variables]
        # A metric may list a variable twice, but its increments count once.
        return compat.unique(variables)

    def results_again(self, logs: Sequence) -> tuple[list, list]:
        """Return what of the logs is a metric's result, or a graph computes from some, with the results of all ranks.

        Other logs are None. The second list has the logs that can't be computed again.
        """
        results = []
        lost = []
        for log in logs:
            recorded = self._recorded(log)
            if recorded is not None:
                results.append(recorded.compute())
                continue
            sources = self._results_behind(log)
            result = None
            are_in_its_graph = all(source.tensor.graph is log.graph for source in sources)
            # The step may have computed the log from results, such as a sum of two.
            if tf.is_symbolic_tensor(log) and are_in_its_graph:
                replacements = {source.tensor.name: source.compute() for source in sources}
                result = compat.computed_again(log, replacements)
            if sources and result is None:
                lost.append(log)
            results.append(result)
        return results, lost

    def _recorded(self, log: Any) -> _Result | None:
        """Return the result that a log is, if a metric has given it."""
        origin = _origin(log)
        return next((result for result in self._results if _origin(result.tensor) is origin), None)

    def _results_behind(self, log: Any) -> list[_Result]:
        """Return the results from which a graph computes a log."""
        if not tf.is_symbolic_tensor(log):
            return []
        # Tensors of several graphs may have one name.
        behind = set(map(id, compat.walk([log], _sources, key=id)))
        return [result for result in self._results if id(result.tensor) in behind]

    def _record(self, compute: Callable[[], Any]) -> Any:
        if tf.executing_eagerly() and self._step.is_custom:
            # Without a graph, nothing tells later what a custom step has computed from the result.
            self._reduce_increments()
        result = compute()
        if isinstance(result, dict):
            for key, tensor in result.items():
                self._results.append(_Result(tensor, partial(_computed_part, compute, key)))
        else:
            self._results.append(_Result(result, compute))
        return result

    def _update_by_share(
        self,
        name: str,
        is_mean: bool,
        is_tracker: bool,
        update_state: Callable,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Update a ``Mean`` or ``Sum``: the ranks' increments are added up, as far as they have samples."""
        are_sums = numbers_given(self._step, name, args, kwargs)
        number, sample_weight = _number_and_sample_weight(*args, **kwargs)
        tensor = compat.to_tensor(number)
        dtype = tf.float32
        if tensor.dtype.is_floating:
            dtype = tensor.dtype
        fraction = tf.cast(self._step.fraction, dtype)
        if tensor.shape.rank == 0:
            sum_args, sum_kwargs = are_sums
            number_is_sum, weight_is_sum = _number_and_sample_weight(*sum_args, **sum_kwargs)
            # A mean counts by the samples of this rank in one number for the whole batch; a sum only if it gets a mean.
            is_weighted = is_mean or number_is_sum is False
            # A sample weight that is a sum over the samples, or isn't known, is summed over the ranks as it is.
            if is_weighted and sample_weight is None:
                sample_weight = fraction
            elif is_weighted and weight_is_sum is False:
                sample_weight = tf.cast(sample_weight, dtype) * fraction
            if is_mean and number_is_sum:
                number = tf.math.divide_no_nan(tf.cast(number, dtype), fraction)
        elif is_tracker:
            # ``Losses`` has divided the samples' values of an unreduced loss by the fraction, which is undone here.
            if sample_weight is not None and self._counts_losses:
                sample_weight = tf.math.divide_no_nan(tf.cast(sample_weight, dtype), fraction)
            number = tensor * fraction
        return update_state(number, sample_weight=sample_weight)

    def _update_with_all_ranks(
        self, name: str, update_state: Callable, *args: Any, **kwargs: Any
    ) -> Any:
        are_sums = numbers_given(self._step, name, args, kwargs)
        args, kwargs = tf.nest.map_structure(self._of_all_ranks, (args, kwargs), are_sums)
        with self._step.in_metric.on():
            return update_state(*args, **kwargs)

    def _update_by_function(
        self, name: str, metric: Any, update_state: Callable, *args: Any, **kwargs: Any
    ) -> Any:
        """Update a mean of what a function of Keras's gives: values of samples, or of the batch."""
        with self._step.in_metric.on():
            # Without the sample weights, which may be the third argument.
            if gives_values_of_samples(metric, *args[:2], **kwargs):
                return update_state(*args, **kwargs)
        variables = list(metric.variables)
        starts = [tf.identity(tf.convert_to_tensor(variable)) for variable in variables]
        self._update_with_all_ranks(name, update_state, *args, **kwargs)
        # The ranks' increments will be summed, and each of them is for the whole batch.
        for variable, start in zip(variables, starts):
            increment = tf.cast(tf.convert_to_tensor(variable) - start, tf.float64)
            variable.assign(start + tf.cast(increment * self._step.fraction, start.dtype))
        return None

    def _of_all_ranks(self, argument: Any, is_sum: bool | None) -> Any:
        """Return an argument of ``update_state`` with the rows of all ranks, or as the number of the whole batch."""
        # A number such as a threshold is the same on every rank, unlike one the step has computed.
        is_setting = isinstance(argument, (bool, int, float, str)) and not is_sum
        if argument is None or is_setting:
            return argument
        tensor = tf.convert_to_tensor(argument)
        if tensor.shape.rank == 0:
            if is_sum:
                factor = self._step.sum_factor
            else:
                factor = self._step.fraction
            # In float64, since a large count in float32 would lose its last digit.
            wide = tf.cast(tensor, tf.float64)
            total = self._step.world.sum_over_ranks(wide * factor)
            return tf.cast(total, tensor.dtype)
        gathered = self._step.world.gather(self._step.share.counted(tensor))
        mask = getattr(argument, "_keras_mask", None)
        if mask is not None:
            counted_mask = self._step.share.counted(mask)
            gathered._keras_mask = self._step.world.gather(counted_mask)
        return gathered


def numbers_given(step: CurrentStep, name: str, args: Any, kwargs: Any) -> Any:
    """Return for each argument of a metric's ``update_state`` if it is a sum over the samples; None if unknown."""
    return tf.nest.map_structure(partial(step.register_number, name), (args, kwargs))


def note_numbers(step: CurrentStep, metrics: Sequence, replaced: Replaced) -> list:
    """Have a step note the numbers that it gives to metrics; return a list that the metrics' results are put into."""
    results = []

    def note(name: str, update_state: Callable, *args: Any, **kwargs: Any) -> Any:
        numbers_given(step, name, args, kwargs)
        return update_state(*args, **kwargs)

    def keep(compute: Callable[[], Any]) -> Any:
        result = compute()
        results.extend(tf.nest.flatten(result))
        return result

    for index, metric in enumerate(metrics):
        replaced.replace(metric, "update_state", partial(note, f"{METRIC} {index}"))
        replaced.replace(metric, "result", keep)
    return results


def _number_and_sample_weight(values: Any, sample_weight: Any = None) -> tuple[Any, Any]:
    """Return the arguments of ``update_state``, whose names these are."""
    return values, sample_weight


def _computed_part(compute: Callable[[], Any], key: Any) -> Any:
    return compute()[key]


def _refuse_reset(name: str, reset_state: Callable[[], None]) -> None:
    raise RuntimeError(
        f"a step of a replicated model called reset_state of its metric {name!r}; the increments that all ranks have "
        "made in the step could not be added up then.\nWhat to do: reset it between steps, in a callback."
    )


def _origin(tensor: Any) -> Any:
    """Return a tensor of a graph behind functions and identities, through which AutoGraph returns values; what else a
    log may be, as it is.
    """
    while isinstance(tensor, tf.Tensor) and tf.is_symbolic_tensor(tensor):
        sources = _outputs_of_function(tensor)
        if tensor.op.type == "Identity":
            sources = [tensor.op.inputs[0]]
        if not sources:
            break
        [tensor] = sources
    return tensor


def _outputs_of_function(tensor: Any) -> list:
    """Return in a list what a tensor is in the function whose call gives it; [] for others."""
    functions = compat.functions_of(tensor.op).get("f", [])
    return [function.outputs[tensor.value_index] for function in functions]


def _sources(tensor: Any) -> list:
    return [*tensor.op.inputs, *_outputs_of_function(tensor)]


def _needs_whole_batch(metric: Any) -> bool:
    """Return True for a metric whose state may not add up: its own class or function computes it, not Keras's."""
    function = compat.function_of_metric(metric)
    if function is not None:
        return not compat.belongs_to_keras(function)
    updating = compat.class_with(type(metric), "update_state")
    is_base_class = updating is compat.keras_of(metric).metrics.Metric
    return is_base_class or not compat.belongs_to_keras(updating)
