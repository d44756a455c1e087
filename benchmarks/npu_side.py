"""The steps of this package, and the step without communication, which runs in the same processes."""

from __future__ import annotations

from typing import Any, Callable

import tensorflow as tf

import npu_device as npu
from benchmarks.payload import payload, require_sum
from benchmarks.trainee import Trainee
from hccl.split.api import set_split_strategy_by_size
from npu_device.gradients import split_strategy


class NpuSide:
    """One rank of a job of this package."""

    def __init__(self, rank: int, ranks: int) -> None:
        npu.open().as_default()
        self._rank = rank
        self._ranks = ranks
        self._trainees: dict[str, Trainee] = {}

    def all_reduce(self, size: int, eager: bool) -> Callable[[], tf.Tensor]:
        """A sum of ``size`` bytes over the ranks."""
        mine = payload(size, self._rank)

        def reduce(tensor: tf.Tensor) -> tf.Tensor:
            return npu.distribute.all_reduce(tensor, "sum")

        called = reduce if eager else tf.function(reduce)
        require_sum(called(mine), self._ranks)
        return lambda: called(mine)

    def training(self, model: str, communicate: bool, segments: int | None) -> Callable[[], tf.Tensor]:
        """A training step; ``segments`` of equal size, or the default split. The split counts when the step is traced,
        which the caller has to see to before it asks for another one.
        """
        if model not in self._trainees:
            self._trainees[model] = Trainee(model, self._rank)
            npu.distribute.broadcast(self._trainees[model].model.variables)
        trainee = self._trainees[model]
        split_strategy.clear()
        if segments is not None:
            set_split_strategy_by_size([100 / segments] * segments)

        @tf.function
        def step(inputs: tf.Tensor, labels: tf.Tensor) -> Any:
            loss, gradients = trainee.gradients(inputs, labels)
            trainee.apply(npu.distribute.all_reduce(gradients, "mean") if communicate else gradients)
            return loss

        return lambda: step(trainee.inputs, trainee.labels)
