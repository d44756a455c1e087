"""The functions of Keras that metrics average: most give one value for each sample, some one for the whole batch."""

from __future__ import annotations

import logging
import weakref
from typing import Any

import tensorflow as tf

from npu_device._src import compat
from npu_device._src.world.share import spec_of_any_length

_log = logging.getLogger("npu_device")

_COMPARING = "circle"
"""The function of Keras whose value for a sample depends on the other samples of the batch."""

# By metric, and there by the types of the arguments, since eager steps would trace the function again and again.
_known = weakref.WeakKeyDictionary[Any, dict[Any, bool]]()


def gives_values_of_samples(metric: Any, y_true: Any = None, y_pred: Any = None, **_: Any) -> bool:
    """Return False if the function of a metric, one of Keras's, gives other values than those of each sample."""
    function = compat.function_of_metric(metric)
    definition = getattr(function, "fn", function)
    if getattr(definition, "__name__", "") == _COMPARING:
        return False
    if not _is_dense(y_true) or not _is_dense(y_pred):
        return True
    specs = (spec_of_any_length(y_true), spec_of_any_length(y_pred))
    known = _known.setdefault(metric, {})
    if specs not in known:
        known[specs] = _has_axis_of_samples(metric, specs)
    return known[specs]


def _is_dense(argument: Any) -> bool:
    return isinstance(argument, tf.Tensor) and bool(argument.shape.rank)


def _has_axis_of_samples(metric: Any, specs: tuple[tf.TensorSpec, tf.TensorSpec]) -> bool:
    """Return whether a metric's function keeps the first axis, whose length isn't known while it is traced."""

    def values(*arguments: Any) -> Any:
        # tf-keras casts what it passes to the function.
        if not compat.of_keras_3(metric):
            arguments = tuple(tf.cast(argument, metric.dtype) for argument in arguments)
        return compat.values_of_metric(metric, *arguments)

    try:
        traced = tf.function(values, autograph=False).get_concrete_function(*specs)
        shape = traced.structured_outputs.shape
    except Exception:
        # The update itself raises an error, if it can't be made.
        _log.debug("function of the metric %s", metric.name, exc_info=True)
        return True
    return shape.rank is None or (shape.rank > 0 and shape[0] is None)
