"""Times the steps of one process of ``npurun speed``. The steps do nothing for it: a thread reads how many steps the
optimizers have counted, every few milliseconds. In the first round, the rows of the models' batches are counted, too.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from typing import Any

import tensorflow as tf

from npu_device._src import compat
from npu_device._src.speed.timed_process import (
    LEAST_SECONDS,
    TRACED,
    WARM_UP_STEPS,
    TimedProcess,
    Times,
    save_times,
)
from npu_device._src.verify.plan import DONE
from npu_device._src.verify.wrapping import wrap
from npu_device._src.world.current_step import current_step

# A look takes some 20 µs and Python's lock: 200 in a second cost less than what a machine varies.
_LOOK_SECONDS = 0.004


class StepClock:
    """The clock of this process, and its hooks."""

    def __init__(self, process: TimedProcess) -> None:
        self._process = process
        # Keras has equality by content for some objects, and optimizers may end with their model.
        self._optimizers: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self._rows: tf.Variable | None = None  # of the batches so far
        self._depth = 0  # of models that call models
        threading.Thread(target=self._watch, name="npu_speed", daemon=True).start()

    def install(self, module: Any) -> None:
        """Wrap the optimizers of a Keras package, and in the first round its models."""
        if module is tf or module.__name__ == "npu_device.distribute":
            return
        wrap(*((*method, self._apply) for method in compat.gradient_entries(module)))
        if self._process.round == TRACED:
            # The import may happen while a function is traced.
            with tf.init_scope():
                self._rows = tf.Variable(0, dtype=tf.int64, trainable=False)
            wrap((module.Model, "__call__", self._call))

    def _apply(self, original: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        self._optimizers[id(optimizer)] = optimizer
        return original(optimizer, *args, **kwargs)

    def _call(self, original: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Count the rows of the batch of a model that is trained."""
        step = current_step()
        is_dry_run = step is not None and step.is_dry_run
        tensors = tf.nest.flatten([*args, *kwargs.values()])
        inputs = next((leaf for leaf in tensors if getattr(leaf, "shape", None)), None)
        if self._depth or is_dry_run or inputs is None or not compat.a_tape_records():
            return original(model, *args, **kwargs)
        assert self._rows is not None
        self._rows.assign_add(tf.shape(inputs, tf.int64)[0])
        # A model may consist of models, which get the same rows.
        self._depth += 1
        try:
            return original(model, *args, **kwargs)
        finally:
            self._depth -= 1

    def _watch(self) -> None:
        begin: tuple[float, int, int] | None = None
        latest_steps = 0
        while True:
            time.sleep(_LOOK_SECONDS)
            steps = self._steps()
            if steps == latest_steps:
                continue
            # A step has just ended, so that whole steps are timed.
            latest_steps = steps
            now = time.monotonic()
            if begin is None:
                if steps >= WARM_UP_STEPS:
                    begin = (now, steps, self._row_count())
                continue
            begin_time, begin_steps, begin_rows = begin
            count = steps - begin_steps
            if count < self._process.steps:
                continue
            rows = self._row_count() - begin_rows
            # Also before the least time is over: the script may end now.
            save_times(self._process, Times(count, now - begin_time, rows or None))
            if now - begin_time >= LEAST_SECONDS:
                (self._process.folder / DONE).touch()
                return

    def _steps(self) -> int:
        """Return how many steps all optimizers have made."""
        # Several optimizers, as of a GAN, count together, in every run alike.
        total = 0
        for optimizer in list(self._optimizers.values()):
            # One that isn't built yet has no counter, and one of a graph none that can be read.
            with contextlib.suppress(Exception):
                total += int(compat.inner_variable(compat.steps_made(optimizer)).numpy())
        return total

    def _row_count(self) -> int:
        if self._rows is None:
            return 0
        return int(self._rows.numpy())
