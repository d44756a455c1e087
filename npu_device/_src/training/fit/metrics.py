"""Metrics inside a step: which samples their updates count, and where in the logs their results stand.

The state of Keras's own metrics adds up, see ``states``. The inputs of any other metric are gathered, so that every
rank's metric sees the whole batch.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Callable

import tensorflow as tf

from npu_device._src import compat
from npu_device._src.training.fit.replaced import Replaced
from npu_device._src.training.fit.share import Share
from npu_device._src.training.training_state import unique


class MetricsInStep:
    """Stands in for the metrics' ``update_state`` and ``result`` while one step of a model runs.

    Args:
        metrics: of the model.
        share: this rank's share of the step's samples.
        add_up: adds up a tensor over the ranks.
        gather: puts all ranks' tensors one after the other along the first dimension.
        replaced: restores them.
    """

    def __init__(
        self,
        metrics: Sequence[Any],
        share: Share,
        add_up: Callable[[tf.Tensor], tf.Tensor],
        gather: Callable[[tf.Tensor], tf.Tensor],
        replaced: Replaced,
    ) -> None:
        self._share = share
        self._add_up = add_up
        self._gather = gather
        self._metrics = list(metrics)
        self._results: list[tuple[Any, Any, Any]] = []
        for metric in metrics:
            if sees_everything(metric):
                replaced.replace(metric, "update_state", self._update_with_all_ranks)
            elif is_plain_mean(metric):
                replaced.replace(metric, "update_state", self._update_mean)
            replaced.replace(metric, "result", self._record)
            replaced.replace(metric, "reset_state", functools.partial(_refuse_reset, metric.name))

    def added_up(self) -> list[Any]:
        """Return the variables whose increments on the ranks are to be added up."""
        counted = [metric for metric in self._metrics if not sees_everything(metric)]
        return unique(variable for metric in counted for variable in metric.variables)

    def result_behind(self, value: Any) -> Callable[[], Any] | None:
        """Return a function that recomputes a value of the step's logs, if a metric's ``result`` gave it."""
        name = _name(value)
        for given, key, result in self._results:
            if given is value or (name is not None and name == _name(given)):
                return functools.partial(_part_of, result, key)
        return None

    def _record(self, result: Callable[[], Any]) -> Any:
        given = result()
        if isinstance(given, dict):
            self._results += [(value, key, result) for key, value in given.items()]
        else:
            self._results.append((given, None, result))
        return given

    def _update_mean(self, update: Callable[..., Any], values: Any, sample_weight: Any = None) -> Any:
        # A loss, for instance: one number for the whole batch, to which this rank contributes by its share of the
        # samples.
        if sample_weight is None and tf.convert_to_tensor(values).shape.rank == 0:
            sample_weight = self._share.weight
        return update(values, sample_weight=sample_weight)

    def _update_with_all_ranks(self, update: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        args, kwargs = tf.nest.map_structure(self._of_all_ranks, (args, kwargs))
        return update(*args, **kwargs)

    def _of_all_ranks(self, value: Any) -> Any:
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        tensor = tf.convert_to_tensor(value)
        if tensor.shape.rank == 0:
            mean = self._add_up(tf.cast(tensor, tf.float32) * self._share.weight)
            return tf.cast(mean, tensor.dtype)
        gathered = self._gather(tensor[: self._share.rows])
        mask = getattr(value, "_keras_mask", None)
        if mask is not None:
            gathered._keras_mask = self._gather(mask[: self._share.rows])
        return gathered


def _refuse_reset(name: str, reset: Callable[[], None]) -> None:
    del reset
    raise RuntimeError(
        f"a step of a replicated model called reset_state of its metric {name!r}; the increments that all ranks have "
        "made in the step could not be added up then.\nWhat to do: reset it between steps, in a callback."
    )


def _part_of(result: Callable[[], Any], key: Any) -> Any:
    return result() if key is None else result()[key]


def _name(value: Any) -> str | None:
    """Return the name of a graph's tensor, behind the identities through which AutoGraph returns values."""
    if not isinstance(value, tf.Tensor) or tf.executing_eagerly():
        return None
    while value.op.type == "Identity":
        value = value.op.inputs[0]
    return str(value.name)


def sees_everything(metric: Any) -> bool:
    """Return True for a metric whose state may not add up: its own class or function computes it, not Keras's."""
    keras = compat.keras_of(metric)
    base = keras.metrics.Metric
    function = getattr(metric, "_fn", None)
    if function is not None:
        return not _is_keras(getattr(function, "__module__", None))
    updating = next(cls for cls in type(metric).__mro__ if "update_state" in vars(cls))
    return updating is base or not _is_keras(updating.__module__)


def is_plain_mean(metric: Any) -> bool:
    """Return True for a ``Mean`` or ``Sum`` of numbers, which the step itself works out."""
    keras = compat.keras_of(metric)
    own = type(metric).update_state
    return any(own is kind.update_state for kind in (keras.metrics.Mean, keras.metrics.Sum))


def _is_keras(module: str | None) -> bool:
    return (module or "").split(".", 1)[0] in ("keras", "tf_keras")
