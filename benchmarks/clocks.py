"""Clocks inside the shared-memory backend, for the case ``profile``: they stand around its functions in this process.

A part's time is split by thread: TensorFlow's threads, or the backend's own. Parts that contain others are marked.
"""

from __future__ import annotations

import functools
import statistics
import threading
import time
from typing import Any, Callable

import numpy as np
import tensorflow as tf

from npu_device._src.collectives.backends.arrays.buffers import BufferPool
from npu_device._src.collectives.backends.arrays.engine import Engine
from npu_device._src.collectives.backends.arrays.stream import Stream
from npu_device._src.collectives.backends.shared_memory import programs
from npu_device._src.collectives.backends.shared_memory.futex import Counter

BACKGROUND = "background thread"
CALLERS = "TensorFlow's threads"

COPY = "copy gradients into the ring"
ADD = "add up"
WAIT = "wait for the other ranks"
START = "starts, including copying and adding up"
FINISH = "finishes, from request to result"
_PARTS = (START, FINISH, COPY, ADD, WAIT)
HAND_OVER = "hand the results over, measured alone"

_HAND_OVERS = 20

Seconds = tuple[float, float]
"""By the wall clock, and of a core."""


class Clocks:
    """The times that the parts take, summed up step by step."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums: dict[tuple[str, str], Seconds] = {}
        self._steps: list[dict[tuple[str, str], Seconds]] = []
        for owner, name, part in (
            (Stream, "copy_in", COPY),
            (Counter, "wait_for", WAIT),
            (Engine, "start", START),
            (Engine, "finish", FINISH),
        ):
            setattr(owner, name, self._timed(part, getattr(owner, name)))
        make_fold = programs.folding
        programs.folding = lambda *arguments: self._timed(ADD, make_fold(*arguments))

    def around(self, step: Callable[[], tf.Tensor]) -> Callable[[], tf.Tensor]:
        """Return the step with clocks on its parts."""

        def noted() -> tf.Tensor:
            self._sums = {}
            result = step()
            self._steps.append(self._sums)
            return result

        return noted

    def medians(self) -> dict[tuple[str, str], Seconds]:
        """Return each part's median seconds, by thread and name, over the steps so far."""
        found = {}
        for part in [(thread, name) for thread in (CALLERS, BACKGROUND) for name in _PARTS]:
            steps = [step.get(part, (0.0, 0.0)) for step in self._steps]
            found[part] = (statistics.median(wall for wall, _ in steps), statistics.median(core for _, core in steps))
        return {part: seconds for part, seconds in found.items() if seconds[0] > 0}

    def _timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*arguments: Any, **named: Any) -> Any:
            wall, core = time.perf_counter(), time.thread_time()
            try:
                return function(*arguments, **named)
            finally:
                wall, core = time.perf_counter() - wall, time.thread_time() - core
                own = threading.current_thread().name.startswith("npu_device")
                key = (BACKGROUND if own else CALLERS, part)
                with self._lock:
                    before = self._sums.get(key, (0.0, 0.0))
                    self._sums[key] = (before[0] + wall, before[1] + core)

        return timed


def hand_over(shapes: list[tuple[int, ...]]) -> Seconds:
    """Time the conversion of float32 results of these shapes to TensorFlow, as the backend does it."""
    pool, stream = BufferPool(), Stream(shapes, np.dtype(np.float32))

    @tf.autograph.experimental.do_not_convert
    def results() -> list[np.ndarray]:
        return stream.results(pool, stream.dtype)[1]

    @tf.function
    def handed() -> tf.Tensor:
        return tf.numpy_function(results, [], [tf.float32] * len(shapes))[-1]

    handed()
    walls, cores = [], []
    for _ in range(_HAND_OVERS):
        wall, core = time.perf_counter(), time.process_time()
        handed()
        walls.append(time.perf_counter() - wall)
        cores.append(time.process_time() - core)
    return statistics.median(walls), statistics.median(cores)
