"""Horovod's callbacks for ``fit``, under either Keras."""

from __future__ import annotations

from typing import Any, Union

import numpy as np
import tensorflow as tf

from npu_device._src import compat
from npu_device._src.training import ranks
from npu_device._src.training.broadcast_callback import NPUBroadcastGlobalVariablesCallback
from npu_device._src.training.reduce_values import all_reduce

_Logs = Union[dict[str, Any], None]


class BroadcastGlobalVariablesCallback(NPUBroadcastGlobalVariablesCallback):
    """Gives all ranks the weights and optimizer state of the root before the first step of ``fit``.

    Args:
        root_rank: the rank that sends.
        device: ignored.
        local_variables: not supported.

    Raises:
        NotImplementedError: there are local variables.
    """

    def __init__(self, root_rank: int, device: str = "", local_variables: Any = None) -> None:
        if local_variables:
            raise NotImplementedError("local_variables aren't supported.\nWhat to do: keep them out of the model.")
        super().__init__(root_rank)


class MetricAverageCallback(tf.keras.callbacks.Callback):
    """Averages the logs of an epoch over the ranks, without weights, before later callbacks see them.

    Args:
        device: ignored.
    """

    def __init__(self, device: str = "") -> None:
        super().__init__()

    def on_epoch_end(self, epoch: int, logs: _Logs = None) -> None:
        if logs:
            names = sorted(logs)
            with compat.eager_mode():
                means = all_reduce([np.asarray([logs[name] for name in names], np.float64)])[0]
            logs.update(zip(names, np.asarray(means).tolist()))


class LearningRateScheduleCallback(tf.keras.callbacks.Callback):
    """Sets the learning rate to the initial one times a multiplier.

    Args:
        initial_lr: the initial learning rate; default: that of the optimizer when training begins.
        multiplier: a number, to the power of the epochs since ``start_epoch``; or a function of the epoch.
        start_epoch, end_epoch: the first epoch in which it is set, and the first one in which it no longer is.
        staircase: set it once per epoch, with a whole epoch; else for each batch, with a fraction.
        momentum_correction: multiply the momentum of legacy optimizers with the change, for one batch.
        steps_per_epoch: default: what ``fit`` knows.

    Raises:
        TypeError, ValueError: no multiplier; the learning rate is a schedule; the number of steps isn't known.
    """

    def __init__(
        self,
        initial_lr: Any = None,
        multiplier: Any = None,
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: Any = None,
    ) -> None:
        super().__init__()
        if multiplier is None:
            raise TypeError("multiplier is missing: a number, or a function of the epoch")
        self.multiplier = multiplier if callable(multiplier) else lambda epoch: multiplier ** (epoch - start_epoch)
        self.initial_lr, self.start_epoch, self.end_epoch = initial_lr, start_epoch, end_epoch
        self.staircase, self.momentum_correction, self.steps_per_epoch = staircase, momentum_correction, steps_per_epoch
        self.current_epoch = start_epoch
        self._momentum: float | None = None  # to be restored after the batch

    def on_train_begin(self, logs: _Logs = None) -> None:
        if self.initial_lr is None:
            self.initial_lr = self._get("learning_rate")
        steps, samples, batch = map(self.params.get, ("steps", "samples", "batch_size"))  # TensorFlow 1: no steps
        self.steps_per_epoch = self.steps_per_epoch or steps or (samples or 0) // (batch or 1)
        if not self.staircase and not self.steps_per_epoch:
            raise ValueError(f"{type(self).__name__}: the steps of an epoch aren't known; pass steps_per_epoch")

    def on_epoch_begin(self, epoch: int, logs: _Logs = None) -> None:
        self.current_epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: _Logs = None) -> None:
        epoch = self.current_epoch
        is_over = self.end_epoch is not None and epoch >= self.end_epoch
        if epoch < self.start_epoch or is_over or (self.staircase and batch):
            return
        old = self._get("learning_rate")
        new = self.initial_lr * self.multiplier(epoch if self.staircase else epoch + batch / self.steps_per_epoch)
        self._set("learning_rate", new)
        if self.momentum_correction and old and hasattr(getattr(self._optimizer(), "momentum", None), "assign"):
            self._momentum = self._get("momentum")
            self._set("momentum", self._momentum * new / old)

    def on_train_batch_end(self, batch: int, logs: _Logs = None) -> None:
        if self._momentum is not None:
            self._set("momentum", self._momentum)
            self._momentum = None

    def on_epoch_end(self, epoch: int, logs: _Logs = None) -> None:
        if logs is not None:
            logs["lr"] = self._get("learning_rate")

    def _optimizer(self) -> Any:
        return getattr(self.model.optimizer, "inner_optimizer", self.model.optimizer)

    def _variable(self, name: str) -> Any:
        variable = getattr(self._optimizer(), name)
        if not isinstance(self._optimizer().get_config()[name], (int, float, np.number)):
            what = f"the {name} of this {type(self._optimizer()).__name__}: it is a schedule"
            raise ValueError(f"{type(self).__name__} can't set {what}.\nWhat to do: give the optimizer a number.")
        return variable

    def _get(self, name: str) -> float:
        variable = self._variable(name)
        return float(variable.numpy() if tf.executing_eagerly() else compat.session_backend().get_value(variable))

    def _set(self, name: str, value: float) -> None:
        variable = self._variable(name)
        if tf.executing_eagerly():
            variable.assign(value)
        else:
            compat.session_backend().set_value(variable, value)


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raises the learning rate, batch by batch, from the initial one divided by the number of ranks to the initial one.

    Args:
        initial_lr: as in ``LearningRateScheduleCallback``.
        warmup_epochs: number of epochs.
        verbose: above 0, rank 0 prints when it is over.
        **arguments: the others of ``LearningRateScheduleCallback``.
    """

    def __init__(self, initial_lr: Any = None, warmup_epochs: int = 5, *, verbose: int = 0, **arguments: Any) -> None:
        def multiplier(epoch: float) -> float:
            epoch += 1 / self.steps_per_epoch  # so that an epoch ends with a round number, as in Horovod
            return (epoch * (ranks.size() - 1) / warmup_epochs + 1) / ranks.size()

        super().__init__(initial_lr, multiplier, 0, warmup_epochs, staircase=False, **arguments)
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: _Logs = None) -> None:
        super().on_epoch_end(epoch, logs)
        if self.end_epoch is not None and epoch == self.end_epoch - 1 and self.verbose > 0 and ranks.rank() == 0:
            print(f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to {self._get('learning_rate'):g}.")
