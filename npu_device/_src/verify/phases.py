"""Which steps of a script are recorded: the first few of each phase of training. And when that is enough.

A phase is the steps that one optimizer makes from one place of the script: from a call of ``fit``, or from a line of a
loop, with the lines that called it. A ``fit`` ends early, once its optimizers have made their steps. A loop goes on,
and its further steps aren't recorded. After a limit of time, the single process begins no new phase. Once those that
have begun have their steps, a thread writes DONE, and the process that waits for it (``forking.py``) kills this one,
wherever the script is. All other processes go as far as the single one did, and end likewise.
"""

from __future__ import annotations

import ast
import itertools
import os
import sys
import threading
import time
import weakref
from collections import Counter
from pathlib import Path
from typing import Any, Callable, NamedTuple

import tensorflow as tf

from npu_device._src import compat
from npu_device._src.cluster.time_limits import SWEEP_SECONDS
from npu_device._src.cluster.tracebacks import is_user_file
from npu_device._src.comparison.compare import Record, RecordedStep, load
from npu_device._src.replicate import main_program
from npu_device._src.threads import start_thread
from npu_device._src.verify.plan import DONE, PlannedProcess

# An optimizer isn't waited for once another one of its model has made so many times the steps.
_RARE = 10
_CALLS_TO_REACH = (
    *("fit", "fit_generator", "train_on_batch", "apply_gradients", "minimize"),
    *("evaluate", "predict"),
)

Stack = tuple[str, ...]
"""Lines of the script, innermost first, as ``train.py:26``."""


class _Fit(NamedTuple):
    """A call of ``fit`` that runs."""

    model: Any
    stack: Stack  # where it is in the script
    on_cut: Callable[[], None]


class Phases:
    """The phases of this process."""

    def __init__(self, process: PlannedProcess, record: Record, lock: threading.RLock) -> None:
        self._process = process
        self._record = record
        self._lock = lock
        # Optimizers have the names that ``StepRecorder`` gives them.
        self._classes: dict[str, str] = {}  # the class of each optimizer
        self._totals = Counter[str]()  # steps of each optimizer
        self._steps = Counter[tuple[str, Stack]]()  # steps of each phase
        # The optimizers that each model has in fit.
        self._optimizers = weakref.WeakKeyDictionary[Any, set[str]]()
        self._fits: list[_Fit] = []
        # Epochs that have ended, by the line that calls ``fit``, which may do so in a loop.
        self._epochs = Counter[Stack]()
        self._is_closed = False
        self._begin = time.monotonic()
        # The times at which the first and the latest step were recorded.
        self._first_time = 0.0
        self._latest_time = 0.0
        # A thread, since the script itself may never come to a place where the limit could be
        # looked at.
        start_thread("npu_verify", self._watch)

    def note_place(self) -> Stack:
        """Note that the script has reached the lines where it is now, and return them."""
        stack = _user_stack()
        self._record.trained_at.update(stack)
        return stack

    def fit(
        self, original: Callable, on_cut: Callable[[], None], model: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Call ``fit``, as a phase; call ``on_cut`` if it is ended within its first epoch."""
        self._fits.append(_Fit(model, self.note_place(), on_cut))
        try:
            return original(model, *args, **kwargs)
        finally:
            self._fits.pop()

    def entered(self, optimizer: str, class_name: str) -> None:
        """Take note of an optimizer whose step is made, or traced."""
        self._classes[optimizer] = class_name
        self.note_place()
        if self._fits:
            self._note_in_fit(optimizer)

    def _note_in_fit(self, optimizer: str) -> None:
        model = self._fits[-1].model
        self._optimizers.setdefault(model, set()).add(optimizer)

    def takes(self, step: RecordedStep, optimizer: str) -> bool:
        """Count a step of an optimizer; if it is to be recorded, write its phase into it, and return True."""
        self._totals[optimizer] += 1
        stack = _user_stack()
        # Within ``fit``, the place is the call of the script, not Keras's step.
        if self._fits:
            stack = self._fits[-1].stack
            self._note_in_fit(optimizer)
        phase = (optimizer, stack)
        # Phases that have begun go on, as the others need as many steps.
        if self._is_closed and phase not in self._steps:
            return False
        self._steps[phase] += 1
        if self._steps[phase] > self._process.steps:
            return False
        self._latest_time = time.monotonic()
        self._first_time = self._first_time or self._latest_time
        # The innermost line and the outermost one tell phases apart for a reader.
        ends = dict.fromkeys([*stack[:1], *stack[-1:]])
        lines = " from ".join(ends)
        step.optimizer = optimizer
        step.optimizer_step = self._totals[optimizer]
        step.phase = f"{self._classes[optimizer]}, {lines}"
        return True

    def end_fit(self) -> Any:
        """End the ``fit`` that runs if its optimizers have made their steps. Return its model; None outside ``fit``."""
        if not self._fits:
            return None
        fit = self._fits[-1]
        optimizers = self._optimizers.get(fit.model, ())
        steps = [self._steps[optimizer, fit.stack] for optimizer in optimizers]
        enough = self._process.steps
        # The fit doesn't go on for an optimizer that steps rarely.
        if steps and (min(steps) >= enough or max(steps) >= _RARE * enough):
            # Keras looks at it after each batch.
            fit.model.stop_training = True
            if not self._epochs[fit.stack]:
                fit.on_cut()
        return fit.model

    def end_epoch(self, callbacks: Any) -> None:
        """Count an epoch of ``fit`` that ends."""
        if self._fits:
            self._epochs[self._fits[-1].stack] += 1

    def _watch(self) -> None:
        """Wait until everything is recorded, and leave DONE for the process that waits for this one."""
        if self._process.is_single:
            self._wait_until(self._end_by_time)
            self._record.ended_at = next(iter(_user_stack()), "an unknown line")
            self._record.unreached = _calls_to_reach(self._record.trained_at)
        else:
            single = self._process.single.folder
            # The number of steps is known only once the single process is done.
            self._wait_until((single / DONE).exists)
            steps = _steps_of_optimizers(load(single))
            self._wait_until(lambda: not steps - _steps_of_optimizers(self._record))
        with self._lock:
            self._record.save(self._process.folder)
        sys.stdout.flush()
        (self._process.folder / DONE).touch()

    def _wait_until(self, ask: Callable[[], bool]) -> None:
        while True:
            time.sleep(SWEEP_SECONDS)
            with self._lock:
                if ask():
                    return

    def _end_by_time(self) -> bool:
        """Close the phases if their time is over; return True if those that have begun have their steps."""
        time_now = time.monotonic()
        if not self._first_time or time_now - self._first_time < self._process.seconds:
            return False
        self._is_closed = True
        # A phase may never get all its steps, so it is given up after a wait as long as its steps took.
        patience = max(self._process.seconds, self._latest_time - self._begin)
        is_idle = time_now - self._latest_time > patience
        return is_idle or min(self._steps.values()) >= self._process.steps


def _steps_of_optimizers(record: Record) -> Counter[str]:
    return Counter(step.optimizer for step in record.steps)


def acting_between_epochs(package: Any, callbacks: Any) -> list[str]:
    """Return the classes of callbacks that do anything when an epoch ends or begins."""
    names = []
    # A list of Keras's own has its callbacks as an attribute, and a single one may be given without a list.
    for callback in tf.nest.flatten(getattr(callbacks, "callbacks", callbacks)):
        for method in ("on_epoch_begin", "on_epoch_end"):
            # A ``LambdaCallback`` has functions as attributes of the object.
            bound = getattr(callback, method, None)
            is_plain = getattr(bound, "__func__", None) is getattr(package.Callback, method)
            if bound is not None and not is_plain:
                names.append(type(callback).__name__)
    return list(dict.fromkeys(names))


def _user_stack() -> Stack:
    """Return where the main thread is in the script, without what has started that."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    lines = itertools.takewhile(
        lambda line: line[0] != main_program.__file__, compat.lines_of_stack(frame)
    )
    return tuple(
        f"{os.path.basename(file)}:{line}" for file, line, _ in lines if is_user_file(file)
    )


def _calls_to_reach(reached: set[str]) -> list[str]:
    """Return the lines of the script that call ``fit``, an optimizer, ``evaluate`` or ``predict``, without those that
    were reached.
    """
    main_file = getattr(sys.modules["__main__"], "__file__", None)
    path = Path(main_file or sys.argv[0])
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return []
    missed = set()
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
            continue
        if call.func.attr in _CALLS_TO_REACH:
            # A call may span lines, and a frame shows any of them.
            lines = range(call.lineno, (call.end_lineno or call.lineno) + 1)
            if not reached.intersection(f"{path.name}:{line}" for line in lines):
                missed.add(call.lineno)
    return [f"{path.name}:{line}" for line in sorted(missed)]
