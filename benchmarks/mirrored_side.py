"""The steps of ``tf.distribute``'s mirrored strategies, used as TensorFlow's guide for custom loops shows it."""

from __future__ import annotations

import os
from typing import Any, Callable

import tensorflow as tf

from benchmarks import images
from benchmarks.payload import payload, require_sum
from benchmarks.trainee import Trainee
from npu_device._src.collectives.resources import LEAST_INTER_OP_THREADS


class MirroredSide:
    """One worker of a strategy; the environment (``TF_CONFIG``) names the others."""

    def __init__(self, rank: int, ranks: int) -> None:
        # The share of the cores that npu_device gives its ranks: the comparison is about communication.
        share = max(1, len(os.sched_getaffinity(0)) // ranks)
        tf.config.threading.set_intra_op_parallelism_threads(share)
        tf.config.threading.set_inter_op_parallelism_threads(max(LEAST_INTER_OP_THREADS, share))
        self._strategy = tf.distribute.MultiWorkerMirroredStrategy()
        self._rank = rank
        self._ranks = ranks

    def all_reduce(self, size: int) -> Callable[[], tf.Tensor]:
        """Return a step that sums ``size`` bytes over the workers."""
        mine = tf.constant(payload(size, self._rank))

        def reduce(tensor: tf.Tensor) -> Any:
            # The strategy refuses the bare argument of a function, since it has no device yet.
            placed = tf.identity(tensor)
            return tf.distribute.get_replica_context().all_reduce(
                tf.distribute.ReduceOp.SUM, placed
            )

        @tf.function
        def called(tensor: tf.Tensor) -> Any:
            return self._strategy.run(reduce, args=(tensor,))

        require_sum(called(mine).numpy(), self._ranks)
        return lambda: called(mine)

    def training(self, model: str) -> Callable[[], tf.Tensor]:
        """Return a training step; the optimizer sums the gradients."""
        with self._strategy.scope():
            trainee = Trainee(model, self._rank)

        def replica(inputs: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
            loss, gradients = trainee.gradients(inputs, labels, share=1 / self._ranks)
            trainee.apply(gradients)
            return loss

        @tf.function
        def step(inputs: tf.Tensor, labels: tf.Tensor) -> Any:
            return self._strategy.run(replica, args=(inputs, labels))

        return lambda: step(trainee.inputs, trainee.labels)


class DevicesSide:
    """``tf.distribute.MirroredStrategy``: one process trains on all GPUs, or on as many parts of the CPU."""

    def __init__(self, rank: int, ranks: int) -> None:
        self._ranks = ranks
        if not tf.config.get_visible_devices("GPU"):
            [cpu] = tf.config.get_visible_devices("CPU")
            parts = [tf.config.LogicalDeviceConfiguration() for _ in range(ranks)]
            tf.config.set_logical_device_configuration(cpu, parts)
        devices = tf.config.list_logical_devices("GPU") or tf.config.list_logical_devices("CPU")
        self._strategy = tf.distribute.MirroredStrategy([device.name for device in devices[:ranks]])

    def training(self, model: str) -> Callable[[], Any]:
        """Return a training step on all devices."""
        with self._strategy.scope():
            trainee = Trainee(model, 0)
        devices = self._strategy.extended.worker_devices

        def placed(tensor: tf.Tensor) -> Any:
            def value(context: Any) -> tf.Tensor:
                with tf.device(devices[context.replica_id_in_sync_group]):
                    return tf.identity(tensor)

            return self._strategy.experimental_distribute_values_from_function(value)

        inputs, labels = placed(trainee.inputs), placed(trainee.labels)

        def replica(inputs: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
            loss, gradients = trainee.gradients(inputs, labels, share=1 / self._ranks)
            trainee.apply(gradients)
            return loss

        @tf.function
        def step() -> Any:
            losses = self._strategy.run(replica, args=(inputs, labels))
            return self._strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)

        return step

    def reading(self, kind: str) -> Callable[[], None]:
        """Return an epoch of a model that waits for its input; see ``images``."""
        with self._strategy.scope():
            model = images.model("tf_keras")
        data = images.batches(kind, True)
        return lambda: model.fit(data, verbose=0) and None
