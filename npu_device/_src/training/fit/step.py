"""One step of a replicated model: Keras's own, or the user's, on this rank's samples, with the result of all ranks."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from npu_device._src.training.fit import batch_norm, keras_models
from npu_device._src.training.fit.losses import LossesInStep
from npu_device._src.training.fit.metrics import MetricsInStep
from npu_device._src.training.fit.replaced import Replaced
from npu_device._src.training.fit.share import Share, is_divided, share_of_batch, share_of_divided
from npu_device._src.training.fit.states import Increments, mean_of_logs
from npu_device._src.training.world import World


class Step:
    """The state of one step while it is running or being traced."""

    def __init__(self, world: World, model: Any, share: Share, training: bool) -> None:
        self.share = share
        self._world = world
        self._replaced = Replaced()
        self._metrics = MetricsInStep(keras_models.metrics_of(model), share, world.add_up, world.gather, self._replaced)
        LossesInStep(model, keras_models.losses_of(model), share, world.add_up, self._replaced)
        if training:
            batch_norm.synchronise(list(model._flatten_layers()), share, world.add_up, self._replaced)
        counts, weight = share.counts, share.weight
        counted = [(variable, counts) for variable in self._metrics.added_up()]
        moved = [(variable, weight) for variable in keras_models.moving_statistics(model)] if training else []
        self._increments = Increments(counted + moved, world.add_up)

    def end(self, logs: Any) -> Any:
        """Reduce the variables, and set the logs to those of all ranks."""
        self.abandon()
        self._increments.reduce()
        values = tf.nest.flatten(logs)
        again = [self._metrics.result_behind(value) for value in values]
        others = [value for value, result in zip(values, again) if result is None]
        rest = iter(mean_of_logs(others, self.share.weight, self._world.add_up))
        return tf.nest.pack_sequence_as(logs, [next(rest) if result is None else result() for result in again])

    def abandon(self) -> None:
        """Restore the model's metrics, losses and layers."""
        self._replaced.restore()


@tf.autograph.experimental.do_not_convert
def share_of(world: World, data: Any, sent: bool) -> Share:
    """Return this rank's share of the data that Keras passes to a step.

    Args:
        world: the ranks.
        data: a batch.
        sent: True when rank 0's batch is sent to all ranks.
    """
    if is_divided(data):
        return share_of_divided(data, world.add_up)
    if sent:
        leaves = tf.nest.flatten(data)
        arrived = iter(world.from_root([leaf for leaf in leaves if leaf is not None]))
        data = tf.nest.pack_sequence_as(data, [None if leaf is None else next(arrived) for leaf in leaves])
    return share_of_batch(data, world.rank, world.size)


@tf.autograph.experimental.do_not_convert
def gather_outputs(world: World, share: Share, outputs: Any) -> Any:
    """Return all ranks' predictions in the order of the batch; None if there isn't one per sample."""
    leaves = tf.nest.flatten(outputs)
    for leaf in leaves:
        dense = isinstance(leaf, tf.Tensor) and (leaf.dtype.is_floating or leaf.dtype.is_integer or leaf.dtype.is_bool)
        if not dense or leaf.shape.rank == 0:
            return None
    return tf.nest.pack_sequence_as(outputs, [world.gather(leaf[: share.rows]) for leaf in leaves])
