"""The calls and callbacks of ``horovod.keras``, under either Keras. Calls have values, also while a graph is built."""

from __future__ import annotations

import functools
from typing import Any, Union

import numpy as np
import tensorflow as tf

from npu_device._src import compat
from npu_device._src.horovod import sent_state, tensor_ops
from npu_device._src.horovod.distributed import DistributedOptimizer
from npu_device._src.horovod.shared_arguments import described
from npu_device._src.training.distribute import ranks
from npu_device._src.training.distribute.reduce_values import all_reduce
from npu_device._src.training.fit.broadcast_callback import NPUBroadcastGlobalVariablesCallback

_Logs = Union[dict[str, Any], None]


def _run_at_once(operation: Any) -> Any:
    """Return an operation that runs at once, also while graphs are built, when its result is an array."""

    @functools.wraps(operation)
    def run(*arguments: Any, **options: Any) -> Any:
        if tf.executing_eagerly():
            return operation(*arguments, **options)
        # Horovod's Keras calls return values, which a graph doesn't have.
        with compat.eager_mode():
            return operation(*arguments, **options).numpy()

    return run


allgather, broadcast, reducescatter = map(
    _run_at_once, (tensor_ops.allgather, tensor_ops.broadcast, tensor_ops.reducescatter)
)


@described
def allreduce(
    value: Any, name: str | None = None, average: bool | None = None, **arguments: Any
) -> Any:
    """Return a value reduced over all ranks."""
    return _run_at_once(tensor_ops.allreduce)(value, average, **arguments)


@described
def broadcast_global_variables(root_rank: int) -> None:
    """Overwrite the variables of the Keras session with those of the root."""
    compat.session_backend().get_session().run(sent_state.broadcast_global_variables(root_rank))


@described
def load_model(
    filepath: Any,
    custom_optimizers: Any = None,
    custom_objects: Any = None,
    compression: Any = None,
    **arguments: Any,
) -> Any:
    """Return a model of ``tf.keras`` from a file, whose optimizer is a ``DistributedOptimizer``.

    Args:
        filepath: file of the model.
        custom_optimizers: optimizer classes that the file names.
        custom_objects: other classes and functions, by name.
    """
    # Keras finds the class of a saved optimizer by its name.
    classes = {optimizer.__name__: optimizer for optimizer in custom_optimizers or ()}
    classes.update(custom_objects or {})
    model = tf.keras.models.load_model(filepath, custom_objects=classes)
    if getattr(model, "optimizer", None) is not None:
        DistributedOptimizer(model.optimizer, compression=compression)
    return model


@described
class BroadcastGlobalVariablesCallback(NPUBroadcastGlobalVariablesCallback):
    """Gives all ranks the weights and optimizer state of the root before the first step of ``fit``.

    Args:
        local_variables: not supported.
    """

    def __init__(self, root_rank: int, device: str = "", local_variables: Any = None) -> None:
        if local_variables:
            raise NotImplementedError(
                "local_variables aren't supported.\nWhat to do: keep them out of the model."
            )
        super().__init__(root_rank)


@described
class MetricAverageCallback(tf.keras.callbacks.Callback):
    """Averages the logs of an epoch over the ranks, without weights, before later callbacks see them."""

    def __init__(self, device: str = "") -> None:
        super().__init__()

    def on_epoch_end(self, epoch: int, logs: _Logs = None) -> None:
        if logs:
            # Keras may log metrics in another order on each rank.
            names = sorted(logs)
            # Python's numbers in the logs have the precision of float64. A metric may be one number per class.
            metrics = [np.asarray(logs[name], np.float64) for name in names]
            with compat.eager_mode():
                means = list(map(np.asarray, all_reduce(metrics)))
            for name, mean in zip(names, means):
                # Scalars are numbers of Python, as Keras logs them.
                logs[name] = mean if mean.ndim else float(mean)


class LearningRateScheduleCallback(tf.keras.callbacks.Callback):
    """Sets the learning rate to the initial one times a multiplier.

    Args:
        initial_lr: the initial learning rate; default: that of rank 0's optimizer when training begins.
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
        if not callable(multiplier):
            base = multiplier
            # A number is a factor for each epoch, as in Horovod.
            multiplier = lambda epoch: base ** (epoch - start_epoch)  # noqa: E731
        self.multiplier = multiplier
        self.initial_lr = initial_lr
        self.start_epoch = start_epoch
        self.end_epoch = end_epoch
        self.staircase = staircase
        self.momentum_correction = momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self.current_epoch = start_epoch
        self._momentum_to_restore: float | None = None  # the momentum to restore after the batch

    def on_train_begin(self, logs: _Logs = None) -> None:
        if self.initial_lr is None:
            # That of rank 0, which may be the only one that has loaded the model: its variables are sent later.
            self.initial_lr = sent_state.broadcast_object(self._number("learning_rate"))
        if not self.steps_per_epoch:
            # Keras in TensorFlow 1 gives the number of samples and the size of a batch instead of the steps.
            steps, samples, batch = map(self.params.get, ("steps", "samples", "batch_size"))
            self.steps_per_epoch = steps or (samples or 0) // (batch or 1)
        if not self.staircase and not self.steps_per_epoch:
            raise ValueError(
                f"{type(self).__name__}: the steps of an epoch aren't known; pass steps_per_epoch"
            )

    def on_epoch_begin(self, epoch: int, logs: _Logs = None) -> None:
        self.current_epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: _Logs = None) -> None:
        epoch = self.current_epoch
        is_over = self.end_epoch is not None and epoch >= self.end_epoch
        # With ``staircase`` the rate changes at the first batch of an epoch only.
        if epoch < self.start_epoch or is_over or (self.staircase and batch):
            return
        old = self._number("learning_rate")
        if not self.staircase:
            epoch += batch / self.steps_per_epoch
        new = self.initial_lr * self.multiplier(epoch)
        self._number("learning_rate", new)
        optimizer = getattr(self.model.optimizer, "inner_optimizer", self.model.optimizer)
        # Momentum holds past gradients times the old rate, so that it is scaled for one batch, as in Horovod.
        if (
            self.momentum_correction
            and old
            and hasattr(getattr(optimizer, "momentum", None), "assign")
        ):
            self._momentum_to_restore = self._number("momentum")
            self._number("momentum", self._momentum_to_restore * new / old)

    def on_train_batch_end(self, batch: int, logs: _Logs = None) -> None:
        if self._momentum_to_restore is not None:
            self._number("momentum", self._momentum_to_restore)
            self._momentum_to_restore = None

    def on_epoch_end(self, epoch: int, logs: _Logs = None) -> None:
        if logs is not None:
            # Horovod's name, which scripts and callbacks read.
            logs["lr"] = self._number("learning_rate")

    def _number(self, name: str, new: float | None = None) -> float:
        """Return a number of the optimizer, after it was set to a new one."""
        optimizer = getattr(self.model.optimizer, "inner_optimizer", self.model.optimizer)
        # The configuration is asked, since a schedule has a value, too, but isn't a number there.
        if not isinstance(optimizer.get_config()[name], (int, float, np.number)):
            raise ValueError(
                f"{type(self).__name__} can't set the {name} of this {type(optimizer).__name__}: it is a schedule.\n"
                "What to do: give the optimizer a number."
            )
        variable = getattr(optimizer, name)
        if tf.executing_eagerly():
            if new is not None:
                variable.assign(new)
            return float(variable.numpy())
        backend = compat.session_backend()
        if new is not None:
            backend.set_value(variable, new)
        return float(backend.get_value(variable))


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raises the learning rate, batch by batch, from the initial one divided by the number of ranks to the initial one.

    Args:
        initial_lr: as in ``LearningRateScheduleCallback``.
        warmup_epochs: number of epochs.
        verbose: above 0, rank 0 prints when it is over.
        **arguments: the others of ``LearningRateScheduleCallback``.
    """

    def __init__(
        self, initial_lr: Any = None, warmup_epochs: int = 5, *, verbose: int = 0, **arguments: Any
    ) -> None:
        def multiplier(epoch: float) -> float:
            # One batch more, so that an epoch ends with a round number, as in Horovod.
            epoch += 1 / self.steps_per_epoch
            return (epoch * (ranks.size() - 1) / warmup_epochs + 1) / ranks.size()

        super().__init__(initial_lr, multiplier, 0, warmup_epochs, staircase=False, **arguments)
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: _Logs = None) -> None:
        super().on_epoch_end(epoch, logs)
        is_last = epoch + 1 == self.end_epoch
        if is_last and self.verbose > 0 and ranks.rank() == 0:
            print(
                f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to {self._number('learning_rate'):g}."
            )
