"""The steps of this package, and the step without communication, which runs in the same processes."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, Callable

import tensorflow as tf

import npu_device as npu
from benchmarks import images
from benchmarks.payload import payload, require_sum
from benchmarks.trainee import Trainee
from hccl.split.api import set_split_strategy_by_size
from npu_device._src.collectives.job import current
from npu_device._src.gradients import split_strategy
from npu_device._src.trace import trace
from npu_device._src.trace.records import Settings
from npu_device._src.training.watching.schedule import only_building


class NpuSide:
    """One rank of a job of this package; the environment chooses the engine. Without one, a process alone."""

    def __init__(self, rank: int, ranks: int) -> None:
        npu.open().as_default()
        self._job = job = current()
        if job is not None and len(set(job.cluster.addresses)) > len(set(job.hosts.leaders)):
            raise RuntimeError(
                "ranks of different hosts share memory, so nothing would be measured between the hosts"
            )
        self._rank = rank
        self._ranks = ranks
        self._trainees: dict[str, Trainee] = {}

    def all_reduce(self, size: int, eager: bool) -> Callable[[], tf.Tensor]:
        """Return a step that sums ``size`` bytes over the ranks."""
        mine = tf.constant(payload(size, self._rank))

        def reduce(tensor: tf.Tensor) -> tf.Tensor:
            return npu.distribute.all_reduce(tensor, "sum")

        called = reduce if eager else tf.function(reduce)
        require_sum(called(mine).numpy(), self._ranks)
        return lambda: called(mine)

    def training(
        self,
        model: str,
        communicate: bool,
        segments: int | None,
        compression: str | None = None,
        compiled: bool = False,
        shares: int = 1,
    ) -> Callable[[], tf.Tensor]:
        """Return a training step with ``segments`` of equal size, or the default split. The split takes effect when the
        step is traced, so the caller has to run it before asking for another one.

        Args:
            model: see ``trainee``.
            communicate: reduce the gradients.
            segments: number of segments; None for the default split.
            compression: as in ``npu.distribute.all_reduce``.
            compiled: by XLA.
            shares: how many ranks' batches are trained at once.
        """
        trainee = self._trainee(model, shares)
        split_strategy._strategies.clear()
        if segments is not None:
            set_split_strategy_by_size([100 / segments] * segments)

        @tf.function(jit_compile=compiled)
        def step(inputs: tf.Tensor, labels: tf.Tensor) -> Any:
            loss, gradients = trainee.gradients(inputs, labels)
            if communicate:
                gradients = npu.distribute.all_reduce(gradients, "mean", compression=compression)
            trainee.apply(gradients)
            return loss

        return lambda: step(trainee.inputs, trainee.labels)

    def updating(
        self, model: str, keras: str, optimizer: str, way: str, shares: int = 1
    ) -> Callable[[], tf.Tensor]:
        """Return a training step with an update that has state.

        Args:
            model: see ``trainee``.
            keras: ``"keras"`` or ``"tf_keras"``.
            optimizer: see ``Trainee.optimizer``.
            way: ``"alone"``, without communication; ``"whole"``, every rank makes all updates; ``"divided"``.
            shares: how many ranks' batches are trained at once.
        """
        trainee = self._trainee(model, shares, keras)
        updater = trainee.optimizer(optimizer)
        if way != "alone":
            updater = npu.distribute.DistributedOptimizer(updater, shard_optimizer=way == "divided")
        variables = trainee.model.trainable_variables
        updater.build(variables)

        @tf.function
        def step(inputs: tf.Tensor, labels: tf.Tensor) -> Any:
            loss, gradients = trainee.gradients(inputs, labels)
            updater.apply_gradients(zip(gradients, variables))
            return loss

        return lambda: step(trainee.inputs, trainee.labels)

    def saving(self, model: str, optimizer: str, divided: bool) -> Callable[[], None]:
        """Return a save of a model of Keras 3 by rank 0 after one step."""
        trainee = self._trainee(model, 1, "keras")
        updater = npu.distribute.DistributedOptimizer(
            trainee.optimizer(optimizer), shard_optimizer=divided
        )
        _, gradients = trainee.gradients(trainee.inputs, trainee.labels)
        trainee.model.compile(updater, "mse")
        updater.apply_gradients(zip(gradients, trainee.model.trainable_variables))
        file = Path(tempfile.mkdtemp(prefix="npu_save_")) / "model.keras"

        def save() -> None:
            if self._rank == 0:
                trainee.model.save(file)

        return save

    def traced_training(self, model: str) -> Callable[[], tf.Tensor]:
        """Return the training step with the default split and the iteration trace."""
        assert self._job is not None
        if trace.running() is None:
            trace.start(self._job, Settings(Path(tempfile.mkdtemp(prefix="npu_trace_"))))
        return self.training(model, True, None)

    def untraced_training(self, model: str) -> Callable[[], tf.Tensor]:
        """Return the same step without the trace, even while one runs later: prepare it before ``traced_training``."""
        trace.stop()
        step = self.training(model, True, None)
        step()  # TensorFlow traces the step here, while no iteration trace runs
        return step

    def watched_training(self, model: str) -> Callable[[], tf.Tensor]:
        """Return the training step with the default split, with audits and all other checks."""
        return self.training(model, True, None)

    def unwatched_training(self, model: str) -> Callable[[], tf.Tensor]:
        """Return the same step without checks."""
        step = self.training(model, True, None)
        with only_building.on():
            step()
        return step

    def reading(self, kind: str, divides: bool, keras: str = "tf_keras") -> Callable[[], None]:
        """Return an epoch of a replicated model that waits for its input; see ``images``."""
        data, model = images.batches(kind, divides), npu.distribute.replicate(images.model(keras))
        return lambda: model.fit(data, verbose=0) and None

    def _trainee(self, model: str, shares: int = 1, keras: str = "tf_keras") -> Trainee:
        name = f"{model}, {keras}"
        if name not in self._trainees:
            self._trainees[name] = Trainee(model, self._rank, shares, keras)
            npu.distribute.broadcast(self._trainees[name].model.variables)
        return self._trainees[name]
