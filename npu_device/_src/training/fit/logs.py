"""The logs of a step that come from no metric: each rank computes them of its own samples, and all get the same."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any, Callable

import numpy as np
import tensorflow as tf

from npu_device._src import compat
from npu_device._src.collectives.graph import origin
from npu_device._src.training.fit.data_flow import DataFlow
from npu_device._src.world.current_step import CurrentStep

LOGS = "logs"
"""The name of the logs of a step among those who take numbers; see ``CurrentStep.register_number``."""

_TRUTH_WARNING = (
    "the log %s of a replicated %s is true or false. On several ranks it is true if it is true for the samples of any "
    "rank, which may differ from one process.\nWhat to do: compute it from numbers of all ranks, as in "
    "npu.distribute.all_reduce(loss) < 1; or, unless the step runs eagerly, with tf.reduce_any or tf.reduce_all."
)
_OWN_LOG_WARNING = (
    "the log %s of a replicated %s isn't a number. On each rank it is that of the samples there, unless the step "
    "gathers them.\nWhat to do: return a number, or npu.distribute.all_gather(value)."
)
# All fractions add up to 1, but for rounding; without any rank, to less.
_NEARLY_ALL = 1 - 1e-9

_log = logging.getLogger("npu_device")


def as_tensor(leaf: Any) -> Any:
    """Return a number of the logs, or a variable, as a tensor; anything else as it is."""
    if hasattr(leaf, "assign"):
        return tf.convert_to_tensor(leaf)
    # While a graph is traced, other numbers of Python are constants, and can't be of samples.
    numbers: tuple = (float, np.floating)
    if tf.executing_eagerly():
        numbers = (bool, int, float, np.bool_, np.number)
    if isinstance(leaf, numbers):
        return compat.to_tensor(leaf)
    return leaf


class OwnLogs:
    """Logs of this rank's samples, by their position, for one exchange.

    Sums over the samples are summed, other numbers averaged by samples, element by element. What ``tf.reduce_all``
    gives is true if it is on all ranks, another truth value if it is on any.
    """

    def __init__(self, step: CurrentStep, warn: Callable[[str, int], None]) -> None:
        self._step = step
        self._warn = warn
        self._logs: dict[int, tf.Tensor] = {}
        self._terms: list[tf.Tensor] = []

    def add(self, position: int, log: Any) -> None:
        """Add a log, unless it isn't a number: that stays as it is on this rank, with a warning."""
        is_sum = self._step.register_number(LOGS, log)
        if not tf.is_tensor(log):
            return
        if not self._can_be_summed(log):
            if self._may_be_of_samples(log):
                self._warn(_OWN_LOG_WARNING, position)
            return
        is_clear = tf.executing_eagerly() or log.dtype != tf.bool or _type_of(log) in ("All", "Any")
        if not is_clear and self._may_be_of_samples(log):
            self._warn(_TRUTH_WARNING, position)
        factor = self._step.fraction
        if is_sum:
            factor = self._step.sum_factor
        self._logs[position] = log
        # A rank without samples has computed it of one that doesn't count.
        self._terms.append(tf.math.multiply_no_nan(_flat(log), tf.cast(factor, tf.float64)))

    def _may_be_of_samples(self, log: Any) -> bool:
        """Return whether a log depends on the samples of this rank; an eager one may."""
        if tf.executing_eagerly():
            return True
        flow = DataFlow(tf.compat.v1.get_default_graph(), _symbolic(self._step.share.data))
        return flow.reach(_symbolic(log)).has_samples

    def _can_be_summed(self, log: Any) -> bool:
        """Return True for numbers of one shape on all ranks."""
        if not isinstance(log, tf.Tensor) or not _is_numeric(log.dtype):
            return False
        if log.shape.rank == 0:
            return True
        # An eager tensor may have any shape on the others.
        if tf.executing_eagerly() or not log.shape.is_fully_defined():
            return False
        rows = self._step.share.rows
        return not isinstance(rows, int) or log.shape[0] != rows

    def of_all_ranks(
        self, sum_over_ranks: Callable[[tf.Tensor], tf.Tensor]
    ) -> Iterator[tuple[int, tf.Tensor]]:
        """Return the positions, and the logs with the samples of all ranks."""
        if not self._logs:
            return
        sums = sum_over_ranks(tf.concat(self._terms, axis=0))
        parts = tf.split(sums, [term.shape[0] for term in self._terms])
        for position, log, part in zip(self._logs, self._logs.values(), parts):
            # In a graph, there was a warning where it can be wrong.
            if tf.executing_eagerly() and log.dtype == tf.bool and 0 < float(part[0]) < _NEARLY_ALL:
                self._warn(_TRUTH_WARNING, position)
            yield position, _like(log, part)


def _symbolic(values: Any) -> list[tf.Tensor]:
    """Return the tensors of the graph in nested values."""
    return list(filter(tf.is_symbolic_tensor, tf.nest.flatten(values, expand_composites=True)))


def _is_numeric(dtype: tf.DType) -> bool:
    return dtype.is_floating or dtype.is_integer or dtype.is_complex or dtype.is_bool


def _type_of(tensor: tf.Tensor) -> str:
    """Return the type of the operation that a tensor of a graph comes from."""
    if not tf.is_symbolic_tensor(tensor):
        return ""
    return str(origin(tensor).op.type)


def _flat(log: tf.Tensor) -> tf.Tensor:
    """Return numbers as float64, in one dimension; of complex ones the real and then the imaginary parts."""
    if log.dtype.is_complex:
        log = tf.stack([tf.math.real(log), tf.math.imag(log)])
    return tf.reshape(tf.cast(log, tf.float64), [-1])


def _like(log: tf.Tensor, flat: tf.Tensor) -> tf.Tensor:
    """Return what ``_flat`` has made of numbers, after the exchange, in the form of those on this rank."""
    if log.dtype.is_complex:
        real, imaginary = tf.split(flat, 2)
        flat = tf.complex(real, imaginary)
    elif log.dtype.is_integer:
        flat = tf.round(flat)
    elif log.dtype.is_bool and _type_of(log) == "All":
        flat = flat > _NEARLY_ALL
    elif log.dtype.is_bool:
        flat = flat > 0
    return tf.reshape(tf.cast(flat, log.dtype), log.shape)
