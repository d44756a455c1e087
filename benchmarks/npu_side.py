"""The steps of this package, and the step without communication, which runs in the same processes."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Callable

import numpy as np
import tensorflow as tf

import npu_device as npu
from benchmarks.clocks import CALLERS, HAND_OVER, Clocks, Seconds, hand_over
from benchmarks.payload import payload, require_sum
from benchmarks.trainee import Trainee
from hccl.split.api import set_split_strategy_by_idx, set_split_strategy_by_size
from npu_device._src.cluster import runtime
from npu_device._src.collectives.agreement import agreed, describe
from npu_device._src.collectives.backends.arrays.buffers import BufferPool
from npu_device._src.collectives.backends.arrays.engine import Engine, PendingOperation
from npu_device._src.collectives.backends.arrays.stream import Stream
from npu_device._src.collectives.backends.shared_memory import programs
from npu_device._src.collectives.backends.shared_memory.shared_memory_backend import channel_of
from npu_device._src.collectives.choice import carries
from npu_device._src.collectives.group import Group
from npu_device._src.gradients import split_strategy
from npu_device._src.trace import trace
from npu_device._src.trace.settings import Settings


class NpuSide:
    """One rank of a job of this package; the environment chooses the backend."""

    def __init__(self, rank: int, ranks: int) -> None:
        npu.open().as_default()
        running = runtime.current()
        assert running is not None
        self._runtime = running
        self._rank = rank
        self._ranks = ranks
        self._trainees: dict[str, Trainee] = {}
        self._parts: Callable[[], dict[tuple[str, str], Seconds]] = dict

    def all_reduce(self, size: int, eager: bool) -> Callable[[], tf.Tensor]:
        """Return a step that sums ``size`` bytes over the ranks."""
        mine = tf.constant(payload(size, self._rank))

        def reduce(tensor: tf.Tensor) -> tf.Tensor:
            return npu.distribute.all_reduce(tensor, "sum")

        called = reduce if eager else tf.function(reduce)
        require_sum(called(mine).numpy(), self._ranks)
        return lambda: called(mine)

    def all_reduce_in_numpy(self, size: int) -> Callable[[], None]:
        """Return the same step on numpy arrays without TensorFlow: the shared-memory engine by itself."""
        mine = payload(size, self._rank)
        group = Group(f"in numpy, {size}", tuple(range(self._ranks)), self._rank)  # memory of its own
        engine, pool = Engine(partial(channel_of, self._runtime, group)), BufferPool()

        def reduce() -> np.ndarray:
            stream = Stream([mine.shape], mine.dtype, [mine])
            flat, [result] = stream.results(pool, mine.dtype)
            pending = PendingOperation(
                lambda channel: programs.all_reduce(channel, stream, flat, "sum", None), result, RuntimeError
            )
            engine.start(pending, in_background=False)
            engine.finish(pending)
            return result

        def step() -> None:
            reduce()

        require_sum(reduce(), self._ranks)
        return step

    def training(
        self, model: str, communicate: bool, segments: int | Sequence[int] | None, compression: str | None = None
    ) -> Callable[[], tf.Tensor]:
        """Return a training step with ``segments`` of equal size, or the default split. The split takes effect when the
        step is traced, so the caller has to run it before asking for another one.

        Args:
            model: see ``trainee``.
            communicate: reduce the gradients.
            segments: number of segments, or their ends as in ``set_split_strategy_by_idx``; None for the default split.
            compression: as in ``npu.distribute.all_reduce``.
        """
        trainee = self._trainee(model)
        split_strategy.forget()
        if isinstance(segments, int):
            set_split_strategy_by_size([100 / segments] * segments)
        elif segments is not None:
            set_split_strategy_by_idx(list(segments))

        @tf.function
        def step(inputs: tf.Tensor, labels: tf.Tensor) -> Any:
            loss, gradients = trainee.gradients(inputs, labels)
            if communicate:
                gradients = npu.distribute.all_reduce(gradients, "mean", compression=compression)
            trainee.apply(gradients)
            return loss

        return lambda: step(trainee.inputs, trainee.labels)

    def profiled_training(self, model: str) -> Callable[[], tf.Tensor]:
        """Return the training step with the default split and clocks inside; ``parts`` returns their times."""
        step = self.training(model, True, None)
        shapes = [tuple(variable.shape) for variable in self._trainee(model).model.trainable_variables]
        handed = hand_over(shapes)
        clocks = Clocks()
        self._parts = lambda: {**clocks.medians(), (CALLERS, HAND_OVER): handed}
        return clocks.around(step)

    def traced_training(self, model: str) -> Callable[[], tf.Tensor]:
        """Return the training step with the default split and the iteration trace."""
        if trace.running() is None:
            trace.start(self._runtime, Settings(Path(tempfile.mkdtemp(prefix="npu_trace_"))))
        return self.training(model, True, None)

    def untraced_training(self, model: str) -> Callable[[], tf.Tensor]:
        """Return the same step without the trace, even while one runs later: prepare it before ``traced_training``."""
        trace.stop()
        step = self.training(model, True, None)
        step()  # TensorFlow traces the step here, while no iteration trace runs
        return step

    def parts(self) -> dict[tuple[str, str], Seconds]:
        """Return the median time of the profiled step's parts, by thread and name."""
        return self._parts()

    def agreement(self, model: str) -> Callable[[], tf.Tensor]:
        """Return a step in which the ranks agree on the reduction of a model's gradients, and do nothing else."""
        values = self._trainee(model).model.trainable_variables
        group = Group("agreement", tuple(range(self._ranks)), self._rank)

        @tf.function
        def agree() -> tf.Tensor:
            call, carried = describe("all_reduce", values, reduction="mean"), carries(self._runtime, group, values)
            with agreed(self._runtime, group, call, values, carried):
                return tf.identity(tf.constant(0))

        return agree

    def _trainee(self, model: str) -> Trainee:
        if model not in self._trainees:
            self._trainees[model] = Trainee(model, self._rank)
            npu.distribute.broadcast(self._trainees[model].model.variables)
        return self._trainees[model]
