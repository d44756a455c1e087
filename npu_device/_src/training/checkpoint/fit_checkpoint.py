"""``npu.train.FitCheckpoint``: ``JobCheckpoint`` as a callback of Keras's ``fit``."""

from __future__ import annotations

import functools
import logging
import math
import os
import re
from typing import Any

import tensorflow as tf

from npu_device._src import compat
from npu_device._src.training.checkpoint.folder import CheckpointError
from npu_device._src.training.checkpoint.job_checkpoint import JobCheckpoint
from npu_device._src.training.checkpoint.selection import everybody
from npu_device._src.training.distribute.ranks import is_main
from npu_device._src.training.fit import start
from npu_device._src.training.fit.replica import replica_of
from npu_device._src.training.fit.sources import again, pull
from npu_device._src.training.opening.current_world import world
from npu_device._src.training.watching import training_state
from npu_device._src.world.world import World

_log = logging.getLogger("npu_device")
_NOTES = "fit"
_INNER = "_npu_inner"
_NUMBER = re.compile(r"_\d+(?=[/:]|$)")  # which Keras gives to further objects of a class


class FitCheckpoint(tf.keras.callbacks.Callback):
    """Save checkpoints of all ranks together while ``fit`` runs, and resume from the newest one when it starts.

    Args:
        directory: directory of the checkpoints, one for each ``fit`` of a script; see ``JobCheckpoint``.
        every: steps between checkpoints; None for none within an epoch.
        each_epoch: save after each epoch, when the callbacks have been called and the next epoch has begun.
        keep: number of checkpoints to keep, above 0.
        preemption: stop all ranks after the same step, with a checkpoint and exit code 75, when any of them is sent
            the signal that ``NPU_DEVICE_PREEMPT_SIGNAL`` names; see ``JobCheckpoint.step_done``.

    Attributes:
        not_kept: what could not be restored, one sentence each.

    Raises:
        ValueError: ``every`` or ``keep`` is not positive; when ``fit`` begins.
        CheckpointError: there are checkpoints, but none can be used, or it doesn't fit the model, or this ``fit`` has
            less data; from ``fit``.

    Call ``fit`` with the same arguments again. It starts in the epoch of the checkpoint, whose finished steps read
    their batches and call other callbacks, but compute nothing. Then weights, optimizers, learning rates, metrics and
    random states are those of the checkpoint, but not what other callbacks remember (``EarlyStopping``, ``History``).

    Put it after callbacks that change the model when ``fit`` ends (``EarlyStopping(restore_best_weights=True)``). With
    a seed that is set before the data are made, the batches come in the same order again; if not, a warning tells it.
    Every rank has to use it, with or without ``replicate``. It works on a single device too.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        every: int | None = None,
        each_epoch: bool = True,
        keep: int = 3,
        preemption: bool = True,
    ) -> None:
        super().__init__()
        self.not_kept: tuple[str, ...] = ()
        self._directory = directory
        self._each_epoch = each_epoch
        self._options: dict[str, Any] = {"every": every, "keep": keep, "preemption": preemption}

    def on_train_begin(self, logs: Any = None) -> None:
        """Look for a checkpoint, and let ``fit`` begin in its epoch."""
        things = {
            f"optimizer{place}": found
            for place, found in enumerate(training_state.optimizers(self.model))
        }
        self._metrics: list[Any] = []
        self._metric_names: list[str] = []
        self._job = JobCheckpoint(
            self._directory, model=self.model, metrics=self._metrics, **things, **self._options
        )
        self._epoch = self._step = self._total = 0  # steps: of the epoch, and of all epochs
        self._begins = False
        self._data = _DataPlace(world(), self.model, (self.params or {}).get("steps") is not None)
        self._resume = self._place_to_resume()
        if self._resume is None:
            self._job.restore()  # nothing; from now on it may save
        else:
            compat.begin_fit_at(self.model, self._resume["epoch"])
        self._inner = getattr(self.model.train_function, _INNER, self.model.train_function)
        outer = functools.partial(self._call)
        setattr(outer, _INNER, self._inner)
        self.model.train_function = outer

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Remember that the next step is the first of an epoch."""
        if self._resume is not None and epoch > self._resume["epoch"]:
            self._must_have_resumed()
        self._epoch, self._begins = epoch, True

    def on_train_end(self, logs: Any = None) -> None:
        """Save the last checkpoint."""
        compat.begin_fit_at(self.model, None)
        self.model.train_function = self._inner
        self._must_have_resumed()
        self._job.try_to_save(self._total, self._notes(ended_of=self.params["epochs"]))
        self._job.close()

    # In place of the model's train function, since saving and resuming happen at the same point between its steps: no
    # other callback comes in between, and a model is built by its first batch.

    def _call(self, given: Any) -> Any:
        count = compat.steps_per_call(self.model)
        pulled = self._begin_epoch(given, count) if self._begins else None
        iterator = self._data.used if given is self._data.given else given
        if self._resume is not None:
            return self._pass_over(pull(iterator, count) if pulled is None else pulled, count)
        logs = self._inner(iterator if pulled is None else again(iterator, pulled))
        steps = (self.params or {}).get("steps")
        done = (
            count if steps is None else min(count, steps - self._step)
        )  # the last call of an epoch may do fewer
        self._step += done
        self._total += done
        self._job.step_done(self._total, self._notes())
        return logs

    def _begin_epoch(self, given: Any, count: int) -> list[Any]:
        taken, self._step, self._begins = self._step, 0, False
        if self._resume is None:
            pulled = self._data.begin_epoch(given, count, taken)
        else:
            pulled, problem = self._data.resume_epoch(given, count, self._resume["data"])
            self.not_kept = () if problem is None else (problem,)
            if problem is not None and is_main():
                text = "the training is resumed in epoch %d, but may not end with the bits of an uninterrupted one: %s"
                _log.warning(text, self._epoch + 1, problem)
        if pulled:
            self._build(given, pulled[0])
        if self._resume is None and self._each_epoch and self._total:
            self._job.try_to_save(self._total, self._notes())
        elif self._resume is not None and self._resume["step"] == 0:
            self._restore()
        return pulled

    def _pass_over(self, batches: list[Any], count: int) -> Any:
        if not batches:
            self._must_have_resumed()
        self._step += len(batches)
        # If the length is unknown, the last call of an epoch has counted as many steps as the others.
        if self._resume is None or math.ceil(self._step / count) * count < self._resume["step"]:
            return {}
        if self._resume["ended_of"] >= self.params["epochs"]:  # also if it ended early
            self.model.stop_training = True
            if is_main():
                _log.warning(
                    "the fit whose checkpoints are in %s had ended: its last state is restored, and nothing is trained."
                    "\nWhat to do, if this is another fit: use a directory for each.",
                    self._directory,
                )
        self._restore()
        return self.model.get_metrics_result()

    def _build(self, batches: Any, batch: Any) -> None:
        replica = replica_of(self.model)
        if replica is not None:
            replica.train.build(batches, batch)
        elif compat.is_built(self.model) or not self.model.run_eagerly:
            spec = start.spec_of(self.model, batches, batch)
            start.build(self.model, "train", self.model.train_step, spec)
        found = [
            (_NUMBER.sub("", f"{metric.name}/{variable.name}"), variable)
            for metric in compat.metrics_of(self.model)
            for variable in metric.variables
        ]
        names = [name for name, _ in found]
        saved = (self._resume or {}).get("metrics", names)
        if sorted(saved) != sorted(names):
            raise CheckpointError(
                f"the checkpoint in {self._directory} has other metrics than this fit: {', '.join(saved)}.\n"
                "What to do: compile the model with the same metrics, or use another directory."
            )
        self._metric_names = saved
        self._metrics[:] = [found.pop([name for name, _ in found].index(name))[1] for name in saved]

    def _notes(self, ended_of: int = 0) -> dict[str, Any]:
        # ``ended_of``: the epochs of which this is the end.
        data = {"number": self._data.number, "passed": self._data.passed, "first": self._data.first}
        place = {"epoch": self._epoch, "step": self._step, "data": data, "ended_of": ended_of}
        return {_NOTES: {**place, "metrics": self._metric_names}}

    def _place_to_resume(self) -> dict[str, Any] | None:
        notes = self._job.peek()
        if notes is None:
            return None
        place: dict[str, Any] = notes.get(_NOTES, {})
        epochs = self.params["epochs"]
        if place.get("epoch", epochs) >= epochs:
            which = (
                f"is from epoch {place['epoch'] + 1}, but this fit has {epochs}"
                if place
                else "is not that of a fit"
            )
            raise CheckpointError(
                f"the checkpoint in {self._directory} {which}.\nLikely cause: the directory of another fit or loop.\n"
                "What to do: use a directory for each."
            )
        return place

    def _restore(self) -> None:
        self._resume = None
        self._total = self._job.restore()
        self.not_kept += self._job.not_kept

    def _must_have_resumed(self) -> None:
        if self._resume is not None:
            raise CheckpointError(
                f"the checkpoint in {self._directory} is that of step {self._resume['step']} in epoch "
                f"{self._resume['epoch'] + 1}, and that epoch has ended before.\nLikely cause: less data, or larger "
                "batches, than in the training that wrote it.\nWhat to do: give fit the same data, or use another "
                "directory."
            )


class _DataPlace:
    """The place of one ``fit`` in its data, of which Keras makes an iterator for each epoch or one for all of them."""

    def __init__(self, world: World | None, model: Any, knows_length: bool) -> None:
        self._world, self._model, self._knows_length = world, model, knows_length
        self.given: Any = None  # by Keras
        self.used: Any = None  # the same one, or after resuming the one at the right place
        self.number = self.passed = (
            0  # iterators before this one; batches that earlier epochs took from it
        )
        self.first: list[
            int
        ] = []  # by rank, the checksum of the first batch, which a resumed fit must find again

    def begin_epoch(self, given: Any, count: int, taken: int) -> list[Any]:
        """Return the first ``count`` batches of an epoch; the epoch before has taken ``taken`` ones."""
        if given is self.given:
            self.passed += taken
        else:
            self.number += self.given is not None
            self.passed, self.given, self.used = 0, given, given
        pulled = pull(self.used, count)
        self.first = everybody(self._world, start.digest(pulled))
        return pulled

    def resume_epoch(
        self, given: Any, count: int, place: dict[str, Any]
    ) -> tuple[list[Any], str | None]:
        """Return the first batches of an epoch at the place of a checkpoint, and why they are others; None if not."""
        self.number, self.passed, self.first = (
            int(place["number"]),
            int(place["passed"]),
            list(place["first"]),
        )
        self.given = self.used = given
        dataset, made = compat.dataset_of(given), 0
        if self.number and compat.is_generated(dataset):
            return pull(given, count), _GENERATED
        for wanted in compat.iterators_made(self._model, self.number, self._knows_length):
            while made < wanted:
                self.used, made = iter(dataset), made + 1
            pull(self.used, self.passed)
            pulled = pull(self.used, count)
            found = everybody(self._world, start.digest(pulled))
            if found == self.first or (
                len(found) != len(self.first) and set(found) == set(self.first)
            ):
                return pulled, None if self._knows_length else _UNKNOWN_LENGTH
        others = [
            rank
            for rank, first in enumerate(found)
            if rank >= len(self.first) or first != self.first[rank]
        ]
        return pulled, _OTHER_DATA.format(ranks=", ".join(map(str, others)))


_GENERATED = (
    "its data come from Python (a PyDataset, a Sequence, a generator), whose order in a later epoch can't be found "
    "again.\nWhat to do: give fit arrays or a tf.data.Dataset."
)
_UNKNOWN_LENGTH = (
    "the length of the data is unknown, so Keras tries a step after their end, and optimizers count it.\n"
    "What to do: dataset.apply(tf.data.experimental.assert_cardinality(batches))."
)
_OTHER_DATA = (
    "rank(s) {ranks} read a different first batch than before.\nLikely cause: data that are shuffled without a seed or "
    "in Python; or other data.\nWhat to do: call keras.utils.set_random_seed before the dataset is made, and shuffle "
    "with tf.data."
)
