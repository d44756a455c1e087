"""Times the steps of one process of ``npurun speed``. The steps do nothing for it: a thread reads how many steps the
optimizers have counted. In the first round, the rows of the models' batches are counted, too.

What a training does only once doesn't count: the time begins anew when a function is traced, as in the first epochs of
``fit`` and in their validation. Short epochs are timed whole.
"""

from __future__ import annotations

import contextlib
import gc
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import tensorflow as tf

from npu_device._src import compat
from npu_device._src.speed.timed_process import TRACED, TimedProcess, Times, finish, save_times
from npu_device._src.threads import start_thread
from npu_device._src.training.fit.sources import TIMED_CALLS
from npu_device._src.training.watching.schedule import FIRST_LOOKS
from npu_device._src.verify.wrapping import after, of_samples, wrap

_WARM_UP_STEPS = 5
"""Steps that aren't timed: they trace functions, fill caches, and are checked."""

_WARM_UP_SECONDS = 2.0
"""After those steps, at most: the ranks compare what they train in some of the first twenty steps of an optimizer."""

_EARLY_STEPS = FIRST_LOOKS[-1] + TIMED_CALLS
"""Steps of each optimizer that are held up: the ranks compare what they train, and then ``fit`` times its input."""

_LEAST_SECONDS = 1.0
"""Short steps are timed for this long, whatever their number, since times are read every few milliseconds."""

_LOOK_SECONDS = 0.004

# A look takes Python's lock, and some 20 µs for each optimizer. Where every core has a rank, it holds all of them up:
# 200 looks in a second took a fifth of the time of steps of 4 ms with eight optimizers, and of steps in Python.
_PAUSE_SECONDS = 0.05

_PART_WITHOUT_LOOKS = 0.9
"""Of the time that the timed steps should take."""

_MOST_RESTARTS = 5
"""Scripts that trace functions again and again are timed with that."""

_SHORT_EPOCH = 2
"""Epochs of at most so many times the timed steps are timed whole."""


class _Mark(NamedTuple):
    """A moment between two steps."""

    time: float
    steps: int  # number of steps that have been made
    rows: int
    ends_epoch: bool


class StepClock:
    """The clock of this process, and its hooks."""

    def __init__(self, process: TimedProcess) -> None:
        self._process = process
        # By id, since Keras compares some objects by content. Steps of optimizers that end with their model count, too.
        self._optimizers: dict[int, Any] = {}
        # The number of rows in the batches so far; a variable, once a model is called.
        self._rows: Any = 0
        self._begin: _Mark | None = None  # begin of the timed steps
        self._warm: _Mark | None = None  # the first one from which steps may be timed
        self._step_seconds = 0.0  # time of a step after that
        self._is_anew = threading.Event()  # set when the time begins anew
        self._restarts = 0
        self._has_short_epochs = False
        self._epoch_steps = 0  # steps of the latest epoch
        self._first_step = 0  # number of steps before that epoch
        self._is_done = False
        wrap(tf.Graph, "__init__", after(self._begin_anew))
        start_thread("npu_device-speed", self._watch)

    def install(self, module: Any) -> None:
        """Wrap the optimizers of a Keras package, and in the first round its models."""
        if not hasattr(module, "callbacks"):
            return
        for owner, name in compat.gradient_methods(module):
            wrap(owner, name, self._apply)
        callbacks = module.callbacks.CallbackList
        wrap(callbacks, "on_epoch_begin", after(self._begin_epoch))
        wrap(callbacks, "on_epoch_end", after(self._end_epoch))
        wrap(callbacks, "on_train_end", after(self._end_fit))
        if self._process.round == TRACED:
            wrap(module.Model, "__call__", of_samples(self._call))

    def _apply(self, original: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        self._optimizers[id(optimizer)] = optimizer
        return original(optimizer, *args, **kwargs)

    def _call(self, original: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Count the rows of the batch of a model that is trained."""
        tensors = tf.nest.flatten([*args, *kwargs.values()])
        inputs = next((leaf for leaf in tensors if getattr(leaf, "shape", None)), None)
        if inputs is not None:
            if not isinstance(self._rows, tf.Variable):
                # Made now, since TensorFlow takes no settings after its first variable, and outside of functions.
                with tf.init_scope():
                    self._rows = tf.Variable(0, dtype=tf.int64, trainable=False)
            self._rows.assign_add(tf.shape(inputs, tf.int64)[0])
        return original(model, *args, **kwargs)

    def _begin_anew(self, graph: tf.Graph) -> None:
        """Time anew after a function is traced."""
        # Tracing a function makes several graphs: only the first one finds a begin, so that a trace restarts once.
        if self._begin is not None and self._restarts < _MOST_RESTARTS:
            self._restarts += 1
            self._begin = None
            self._is_anew.set()

    def _begin_epoch(self, callbacks: Any) -> None:
        # Keras knows the length of some datasets only after the first epoch.
        length = (callbacks.params or {}).get("steps") or self._epoch_steps
        # With a batch per rank, the most ranks have the fewest steps: all decide by those.
        if self._process.horovod:
            length *= self._process.ranks / max(self._process.setups)[0]
        self._has_short_epochs = 0 < length <= _SHORT_EPOCH * self._process.steps
        if self._has_short_epochs and not (self._begin and self._begin.ends_epoch):
            self._begin = None
        self._first_step = self._steps()

    def _end_epoch(self, callbacks: Any) -> None:
        self._epoch_steps = self._steps() - self._first_step
        # The epoch begins after the validation, and what callbacks write.
        self._mark_time(ends_epoch=True)

    def _end_fit(self, callbacks: Any) -> None:
        # The script may go on with a loop of its own.
        self._has_short_epochs = False

    def _watch(self) -> None:
        while not self._is_done:
            # Looked at when a step has just ended, so that whole steps are timed. The callbacks mark short epochs,
            # whose steps needn't be held up by looks.
            steps = self._steps()
            while not self._has_short_epochs and self._steps() == steps:
                time.sleep(_LOOK_SECONDS)
            self._mark_time(ends_epoch=False)
            self._is_anew.clear()
            self._is_anew.wait(self._pause())

    def _pause(self) -> float:
        """Return in how many seconds to look again: soon before there should be enough steps."""
        begin = self._begin
        if begin is None:
            return _PAUSE_SECONDS
        elapsed = time.monotonic() - begin.time
        # Times are kept after so many steps, and once more after the least time.
        wanted = self._process.steps * self._step_seconds
        if elapsed > wanted:
            wanted = _LEAST_SECONDS
        return max(_PAUSE_SECONDS, _PART_WITHOUT_LOOKS * wanted - elapsed)

    def _mark_time(self, ends_epoch: bool) -> None:
        """Begin with the timed steps, or keep their times if there are enough."""
        if self._has_short_epochs != ends_epoch:
            return
        mark = _Mark(time.monotonic(), self._steps(), int(self._rows), ends_epoch)
        begin = self._begin
        if begin is None:
            if mark.steps >= _WARM_UP_STEPS:
                if self._warm is None:
                    # Python looks once through all objects that importing and tracing made: some 0.25 s, for which
                    # all ranks wait. It does so now, rather than at some point within the timed steps.
                    gc.collect()
                    self._warm = mark._replace(time=time.monotonic())
                warm_seconds = mark.time - self._warm.time
                is_warm = warm_seconds >= _WARM_UP_SECONDS
                if is_warm or mark.steps > _EARLY_STEPS * len(self._optimizers):
                    self._begin = mark
                    warm_steps = max(1, mark.steps - self._warm.steps)
                    self._step_seconds = warm_seconds / warm_steps
            return
        count = mark.steps - begin.steps
        seconds = mark.time - begin.time
        if count < self._process.steps or self._is_done:
            return
        # Times are left also before the least time is over: the script may end now.
        memory = 0
        # Memory is read in the traced run only, since that takes a while.
        if self._process.round == TRACED:
            memory = _memory()
        save_times(self._process, Times(count, seconds, mark.rows - begin.rows or None, memory))
        if seconds >= _LEAST_SECONDS:
            self._is_done = True
            finish(self._process)

    def _steps(self) -> int:
        """Return how many steps all optimizers have made."""
        # Several optimizers, as of a GAN, count together, in every run alike.
        total = 0
        for optimizer in list(self._optimizers.values()):
            # An optimizer that isn't built yet has no counter, and one of a graph none that can be read.
            with contextlib.suppress(Exception):
                total += int(compat.inner_variable(compat.steps_made(optimizer)))
        return total


def _memory() -> int:
    """Return the bytes of memory of this process, its part of what it shares with others."""
    # Forks of one process share most pages of TensorFlow, which resident sizes would count twice.
    rollup = Path("/proc/self/smaps_rollup").read_text()
    return int(rollup.partition("Pss:")[2].split()[0]) << 10
