"""``npu.train.FitCheckpoint``: ``JobCheckpoint`` as a callback of Keras's ``fit``."""

from __future__ import annotations

import collections
import functools
import math
import os
import re
from typing import Any

import tensorflow as tf

from npu_device._src import compat
from npu_device._src.training.checkpoint.callback_states import (
    CallbackStates,
    list_of_fit,
    list_with,
    lists_of_fits,
)
from npu_device._src.training.checkpoint.fit_data import FitData, Position
from npu_device._src.training.checkpoint.folder import CheckpointError, require_local
from npu_device._src.training.checkpoint.job_checkpoint import JobCheckpoint
from npu_device._src.training.checkpoint.selection import gather, warn
from npu_device._src.training.fit import start
from npu_device._src.training.fit.function import INNER, Function
from npu_device._src.training.fit.replica import replica_of
from npu_device._src.training.fit.sources import pull, with_put_back
from npu_device._src.training.opening.current_world import current_world
from npu_device._src.training.watching import training_state

_FIT_KEY = "fit"
# The suffix that Keras gives to further objects of a class. It depends on what a script made before.
_KERAS_SUFFIX = re.compile(r"_\d+(?=[/:]|$)")
_newest: FitCheckpoint | None = None  # the callback whose fit has begun last, until that fit ends


class FitCheckpoint(tf.keras.callbacks.Callback):
    """Save checkpoints of all ranks together while ``fit`` runs, and resume from the newest one when it starts.

    Args:
        directory: directory of the checkpoints, one for each ``fit`` of a script; see ``JobCheckpoint``.
        every: steps between checkpoints; None for none within an epoch.
        memory_every: steps between copies in memory that npurun holds; see ``JobCheckpoint``.
        each_epoch: save after each epoch, when the callbacks have been called and the next epoch has begun.
        keep: number of checkpoints to keep, above 0.
        preemption: stop all ranks after the same step, with a checkpoint and exit code 75, when any of them is sent
            the signal that ``NPU_DEVICE_PREEMPT_SIGNAL`` names; see ``JobCheckpoint.step_done``.

    Attributes:
        not_kept: what could not be restored, one sentence each.

    Raises:
        ValueError: ``every``, ``memory_every`` or ``keep`` is not positive; when ``fit`` begins.
        CheckpointError: there are checkpoints, but none can be used, or it doesn't fit the model, or this ``fit`` has
            less data; from ``fit``.

    Call ``fit`` with the same arguments again. It starts in the epoch of the checkpoint, whose finished steps read
    their batches, but compute nothing. Then weights, optimizers, learning rates, metrics and random states are those of
    the checkpoint, and so is what callbacks remember: those of Keras, and those of the script that have ``get_state()``
    and ``set_state(state)``, for states of numbers, strings and arrays. Until then, only other callbacks are called.

    Put it after callbacks that change the model when ``fit`` ends (``EarlyStopping(restore_best_weights=True)``). With
    a seed that is set before the data are made, the batches come in the same order again; if not, a warning tells it.
    Every rank has to use it, with or without ``replicate``. It works on a single device too.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        every: int | None = None,
        memory_every: int | None = None,
        each_epoch: bool = True,
        keep: int = 3,
        preemption: bool = True,
    ) -> None:
        super().__init__()
        # Without this, tf-keras reads the logs of each step for ``on_train_batch_begin``.
        self._supports_tf_logs = True
        require_local(directory)
        self.not_kept: tuple[str, ...] = ()
        self._directory = directory
        self._each_epoch = each_epoch
        self._new_job = functools.partial(
            JobCheckpoint,
            directory,
            every=every,
            memory_every=memory_every,
            keep=keep,
            preemption=preemption,
        )

    def on_train_begin(self, logs: Any = None) -> None:
        """Look for a checkpoint, and let ``fit`` begin in its epoch."""
        global _newest
        # If an error has ended the fit before, Keras has told its callbacks nothing.
        if _newest is not None and (_newest is self or list_with(_newest) is None):
            _newest._job.close()
        optimizers = training_state.optimizers(self.model)
        # Optimizers are named by their positions, since two of them may be of one class.
        named = {f"optimizer{index}": optimizer for index, optimizer in enumerate(optimizers)}
        self._metrics: list = []
        self._metric_names: list[str] = []
        self._callbacks = CallbackStates(self)
        self._job: JobCheckpoint = self._new_job(
            model=self.model,
            metrics=self._metrics,
            best_weights=self._callbacks.arrays,
            per_rank={"callbacks": self._callbacks},
            **named,
        )
        _newest = self
        self._epoch = 0
        self._step = 0  # step within the epoch
        self._total = 0  # steps of all epochs
        self._begins_epoch = False
        # Whether Keras tells steps, and the next call of the train function is one: ``train_on_batch`` makes others.
        self._knows_steps = False
        self._is_step = False
        self._is_cut = False  # a callback has ended an epoch, and so the fit, at a step
        self._stops_at_epoch_end = False
        self._has_begun_files = False
        # A script's own ``CallbackList`` may know neither steps nor epochs, and that of tf-keras then gives no
        # ``params``.
        params: dict[str, Any] = getattr(self, "params", None) or {}
        self._epoch_steps: int | None = params.get("steps")
        self._epochs: int | None = params.get("epochs")
        knows_length = self._epoch_steps is not None
        world = current_world()
        if world is not None:
            start.keep_steps_per_execution(world, self.model)
        self._data = FitData(world, self.model, knows_length)
        self._resume = self._position_to_resume()
        if self._resume is None:
            # Restores nothing, but allows the checkpoint to save.
            self._job._restore_state()
        else:
            compat.begin_fit_at(self.model, self._resume["epoch"])
        self._list = list_of_fit()
        self._wrap_train_function()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Remember that the next step is the first of an epoch."""
        if self._resume is not None and epoch > self._resume["epoch"]:
            self._must_have_resumed()
        # Keras has read it. If it stayed, the next fit would begin there after an error.
        compat.begin_fit_at(self.model, None)
        self._epoch = epoch
        self._begins_epoch = True
        # By now all callbacks have begun.
        if not self._has_begun_files:
            self._has_begun_files = True
            self._callbacks.begin_files()
        if self._resume is not None:
            self._callbacks.hide()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Tell a step of this ``fit`` from other calls of the train function: a callback may ``train_on_batch``."""
        self._knows_steps = True
        self._is_step = True
        # A callback may have had Keras make it anew, for instance to train other layers from now on.
        if _is_new(self.model.train_function):
            self._wrap_train_function()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Save a checkpoint if a callback stops ``fit`` within an epoch: the next one goes on there."""
        is_ended = self._stops_at_epoch_end or self._resume is not None
        if not self.model.stop_training or self._is_cut or is_ended:
            return
        self._is_cut = True
        # After the last step, the other ranks may not have been stopped.
        if self._is_within_epoch():
            self._job.try_to_save(self._total, self._notes())

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Let Keras call the other callbacks again, when the ``fit`` of the checkpoint had ended."""
        self._callbacks.show()
        if self._stops_at_epoch_end:
            self.model.stop_training = True

    def on_train_end(self, logs: Any = None) -> None:
        """Save the last checkpoint, unless there is one of the step in which a callback has stopped the ``fit``."""
        self._must_have_resumed()
        is_cut = any(gather(current_world(), self._is_cut))
        ended_epochs = self._epoch + 1
        if self._epochs is not None and not is_cut:
            ended_epochs = self._epochs
        # Without an epoch there is nothing to go on with.
        has_trained = self._has_begun_files
        if has_trained and not (is_cut and self._is_within_epoch()):
            self._job.try_to_save(self._total, self._notes(ended_of=ended_epochs))
        if is_cut:
            text = (
                "a callback stopped this fit in epoch %d; the next fit that uses %s continues there"
            )
            warn(text, self._epoch + 1, self._directory)
        self._callbacks.end()
        self._leave()

    def _leave(self) -> None:
        global _newest
        self.model.train_function = self._inner
        self._job.close()
        if _newest is self:
            _newest = None

    def _is_within_epoch(self) -> bool:
        return self._epoch_steps is None or self._step < self._epoch_steps

    # A callback's step stands in place of the model's train function, since saving and resuming happen at the same
    # point between its steps: no other callback comes in between, and a model is built by its first batch.

    def _wrap_train_function(self) -> None:
        # An interrupted ``fit`` may have left its wrapper on the model.
        self._inner = getattr(self.model.train_function, INNER, self.model.train_function)
        # A partial takes attributes, unlike a bound method.
        outer = functools.partial(self._call)
        setattr(outer, INNER, self._inner)
        self.model.train_function = outer

    def _call(self, keras_iterator: Any) -> Any:
        if keras_iterator is not self._data.keras_iterator and list_of_fit() is not self._list:
            # Keras keeps the train function for another fit: one that a callback of this fit has begun, or one after an
            # error has ended this fit.
            if not any(callbacks is self._list for callbacks in lists_of_fits()):
                self._leave()
            return self._inner(keras_iterator)
        if self._knows_steps and not self._is_step:
            return self._inner(keras_iterator)
        self._is_step = False
        count = compat.steps_per_call(self.model)
        pulled = None
        if self._begins_epoch:
            pulled = self._begin_epoch(keras_iterator, count)
        iterator = keras_iterator
        # Keras goes on with its own iterator, which isn't at the right position after resuming.
        if iterator is self._data.keras_iterator:
            iterator = self._data.iterator
        if self._resume is not None:
            if pulled is None:
                pulled = pull(iterator, count)
            return self._pass_over(pulled, count)
        steps = self._epoch_steps
        # The last call of an epoch makes as many steps as there are batches: Keras 3 doesn't end it at steps_per_epoch.
        if pulled is None and steps is not None and steps - self._step < count:
            pulled = pull(iterator, count)
        steps_done = count
        if pulled is not None:
            iterator = with_put_back(iterator, pulled)
            steps_done = len(pulled)
        logs = self._inner(iterator)
        self._step += steps_done
        self._total += steps_done
        self._job.step_done(self._total, self._notes())
        return logs

    def _begin_epoch(self, keras_iterator: Any, count: int) -> list:
        steps_before = self._step
        self._step = 0
        self._begins_epoch = False
        if self._resume is None:
            pulled = self._data.begin_epoch(keras_iterator, count, steps_before)
        else:
            position = Position.from_notes(self._resume["data"])
            pulled, problem = self._data.resume_epoch(keras_iterator, count, position)
            self.not_kept = ()
            if problem is not None:
                self.not_kept = (problem,)
                text = (
                    "the training is resumed in epoch %d, but may not end with the bits of an uninterrupted one: "
                    "%s"
                )
                warn(text, self._epoch + 1, problem)
        if pulled:
            self._build(keras_iterator, pulled[0])
            self._job._reserve()
        # The state is still as the epoch before has left it, with what callbacks did at its end.
        if self._resume is None and self._each_epoch and self._total:
            self._job.try_to_save(self._total, self._notes())
        elif self._resume is not None and self._resume["step"] == 0:
            # A checkpoint of step 0 was written at the end of the epoch before: no batch has to be passed over.
            self._restore()
        return pulled

    def _pass_over(self, batches: list, count: int) -> Any:
        if not batches:
            self._must_have_resumed()
        self._step += len(batches)
        # If the length is unknown, the last call of an epoch has counted as many steps as the others.
        counted_steps = math.ceil(self._step / count) * count
        if self._resume is None or counted_steps < self._resume["step"]:
            return {}
        self._note_left_out(count)
        ended_epochs = self._resume["ended_of"]
        # An epoch that ended early counts, too.
        if self._epochs is not None and ended_epochs >= self._epochs:
            # At the end of an epoch, Keras 3 makes the next iterator, which draws another order for the next fit.
            self._stops_at_epoch_end = True
            self.model.stop_training = self._is_within_epoch()
            warn(
                "the fit whose checkpoints are in %s had ended: its last state is restored, and nothing is trained."
                "\nWhat to do, if this is another fit: use a directory for each.",
                self._directory,
            )
        self._restore()
        # The states of an ended ``fit``, to which epochs may be added, have its last epoch's end in them.
        if ended_epochs > 0:
            self._callbacks.hide()
        return self.model.get_metrics_result()

    def _note_left_out(self, count: int) -> None:
        """Warn if calls of ``count`` steps don't end where the checkpoint was written."""
        assert self._resume is not None
        left_out = self._step - self._resume["step"]
        if left_out <= 0 or self._epoch_steps is None:
            return
        problem = (
            f"{left_out} of the batches of epoch {self._epoch + 1} are left out, since the checkpoint is of step "
            f"{self._resume['step']}, and steps_per_execution is {count} now"
        )
        self.not_kept += (problem,)
        warn("the training is resumed, but %s", problem)

    def _build(self, batches: Any, batch: Any) -> None:
        replica = replica_of(self.model)
        if replica is not None:
            replica.train.build(batches, batch)
        else:
            spec = start.spec_of(self.model, batches, batch)
            try:
                start.build(self.model, "train", self.model.train_step, spec)
            except Exception:
                # An eager step that needs values can't be traced. Without a checkpoint, it makes its variables itself.
                if self._resume is not None or not self.model.run_eagerly:
                    raise
        names = []
        states = collections.defaultdict[str, list](list)
        for metric in compat.metrics_of(self.model):
            for variable in metric.variables:
                name = _KERAS_SUFFIX.sub("", f"{metric.name}/{variable.name}")
                names.append(name)
                states[name].append(variable)
        saved = (self._resume or {}).get("metrics", names)
        if sorted(saved) != sorted(names):
            raise CheckpointError(
                f"the checkpoint in {self._directory} has other metrics than this fit: {', '.join(saved)}.\n"
                "What to do: compile the model with the same metrics, or use another directory."
            )
        self._metric_names = saved
        # Metrics may have been made in another order; only if several have one name, their order counts.
        self._metrics[:] = [states[name].pop(0) for name in saved]

    def _notes(self, ended_of: int = 0) -> dict[str, Any]:
        # ``ended_of``: the epochs of which this is the end.
        notes = {
            "epoch": self._epoch,
            "step": self._step,
            "data": self._data.position.notes(),
            "ended_of": ended_of,
            "metrics": self._metric_names,
        }
        return {_FIT_KEY: notes}

    def _position_to_resume(self) -> dict[str, Any] | None:
        notes = self._job.peek()
        if notes is None:
            return None
        position: dict[str, Any] = notes.get(_FIT_KEY, {})
        epochs = self._epochs
        # The notes of a checkpoint that no fit has written have no epoch.
        if position and (epochs is None or position["epoch"] < epochs):
            return position
        problem = "is not that of a fit"
        if position:
            problem = f"is from epoch {position['epoch'] + 1}, but this fit has {epochs}"
        raise CheckpointError(
            f"the checkpoint in {self._directory} {problem}.\nLikely cause: the directory of another fit or loop.\n"
            "What to do: use a directory for each."
        )

    def _restore(self) -> None:
        self._resume = None
        self._total = self._job._restore_state()
        compat.count_train_steps(self.model, self._total)
        self.not_kept += self._job.not_kept
        self._callbacks.show()
        lost = self._callbacks.resume(max(0, self._step - 1))
        if lost:
            warn("the training is resumed, except for\n  %s", "\n  ".join(lost))
        self.not_kept += tuple(lost)

    def _must_have_resumed(self) -> None:
        if self._resume is not None:
            raise CheckpointError(
                f"the checkpoint in {self._directory} is that of step {self._resume['step']} in epoch "
                f"{self._resume['epoch'] + 1}, and that epoch has ended before.\nLikely cause: less data, or larger "
                "batches, than in the training that wrote it.\nWhat to do: give fit the same data, or use another "
                "directory."
            )


def _is_new(function: Any) -> bool:
    """Return whether a train function is as Keras or a replicated model has made it: no callback is around it."""
    return isinstance(function, Function) or (
        callable(function) and compat.belongs_to_keras(function)
    )
