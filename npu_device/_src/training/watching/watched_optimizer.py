"""What is known of one optimizer whose applied gradients are watched."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Optional

import numpy as np
import tensorflow as tf

from npu_device._src import compat
from npu_device._src.collectives.job import Job
from npu_device._src.gradients.reduction import dense_of
from npu_device._src.training.watching.same_samples import SameSamples
from npu_device._src.training.watching.schedule import FIRST_LOOKS, Schedule

_SUMMED = 16  # number of gradients that are added up, the smallest ones

Sums = list[list[float]]
"""For each gradient its sum, and that of its absolute values."""


class Post(NamedTuple):
    """The sums of the gradients of a step, as a rank has posted them."""

    step: int
    sums: Sums


class WatchedOptimizer:
    """What is known of one optimizer.

    Attributes:
        signature: what it trains, the same on every rank.
        trained: the ids of its variables.
        is_reduced: the gradients that it applies are reduced; None while that isn't known.
        posted: the first sums that were posted; None before.
        values_before: of what XLA trains, before its first step.
        start: the name and checksums of an eager loop's variables before its first step, until they are compared.
    """

    def __init__(
        self, job: Job, optimizer: Any, variables: Sequence, first_look: int = FIRST_LOOKS[0]
    ) -> None:
        self.class_name = type(optimizer).__name__
        shapes = [tf.TensorShape(variable.shape) for variable in variables]
        numbers = sum(shape.num_elements() or 0 for shape in shapes)  # unknown shapes count nothing
        # Names may differ among ranks; numbers don't.
        self.signature = f"{len(variables)} variables, {numbers} numbers"
        self.trained = {id(compat.inner_variable(variable)) for variable in variables}
        self.schedule = Schedule(job.device("CPU"), first_look)
        self.samples = SameSamples(job)
        self.is_reduced: Optional[bool] = None
        self.posted: Optional[Post] = None
        self.values_before: list[np.ndarray] = []
        self.start: Optional[tuple[str, list[int]]] = None
        # Weak, since looking at a model must not keep it.
        self._variables = weakref.WeakValueDictionary(enumerate(variables))

    def living(self) -> list:
        """Return the variables that still exist."""
        return list(self._variables.values())


def smallest(gradients: Iterable) -> list:
    """Return the tensors of the smallest gradients, or variables, with floating-point numbers."""
    tensors = [tensor for tensor in map(dense_of, gradients) if tensor.dtype.is_floating]
    # Tensors of unknown size come last.
    size = lambda tensor: tensor.shape.num_elements() or sys.maxsize  # noqa: E731
    return sorted(tensors, key=size)[:_SUMMED]


def arrays_of(variables: Iterable) -> list[np.ndarray]:
    """Return the values of the smallest variables now."""
    return list(map(compat.to_array, smallest(map(tf.convert_to_tensor, variables))))
