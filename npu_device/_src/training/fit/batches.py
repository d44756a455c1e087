"""Takes batches out of the iterator of a ``fit``, puts them back, and times how long rank 0 waits for them."""

from __future__ import annotations

import functools
import logging
import statistics
import time
from typing import Any, Callable

import tensorflow as tf

from npu_device._src.cluster.time_limits import LEAST_INPUT_WAIT_SECONDS

_log = logging.getLogger("npu_device")

_LOOKS = (20, 200, 2000)  # calls of the train function before the waits are timed
_CALLS = 5  # that are timed in a row: one that fills a buffer doesn't count
_SHARE = 0.25  # of a step

_WHOLE = (
    "Each rank prepares the whole batch and keeps its share.\nWhat to do: let each rank prepare its own samples only, "
    "by npu.distribute.pipeline(source, map, batch), by rows(index, start, stop) of a Sequence, or "
    "from files of its own by npu.distribute.divided."
)
_OWN = (
    "Each rank prepares its own samples only.\nWhat to do: cache what is prepared, raise num_parallel_calls, start "
    "fewer ranks on each host, or use more hosts."
)


def pull(batches: Any, count: int) -> list[Any]:
    pulled = []
    for _ in range(count):
        try:
            pulled.append(next(batches))
        except (StopIteration, tf.errors.OutOfRangeError):
            break
    return pulled


def again(batches: Any, pulled: list[Any]) -> Any:
    """Return an iterator of the same kind that begins with what was pulled, so that a function isn't traced again."""
    if not pulled:
        return batches  # whose end Keras handles
    if not isinstance(batches, tf.data.Iterator):
        return iter(pulled)
    # Not a generator: its Python calls can wait for ever on a rank with one thread, and each one stays in memory.
    parts = map(tf.data.Dataset.from_tensors, pulled)
    variant = tf.data.experimental.to_variant(functools.reduce(tf.data.Dataset.concatenate, parts))
    return iter(tf.data.experimental.from_variant(variant, batches.element_spec))  # which may have unknown dimensions


class InputWait:
    """Times some calls of a train function, in which the batches are taken here instead of in the function."""

    def __init__(self) -> None:
        self.is_over = False  # the warning is given, or no look is left
        self._calls = 0
        self._looks = list(_LOOKS)
        self._found: list[tuple[float, float]] = []

    def call(self, function: Callable[[Any], Any], batches: Any, steps: int, own_data: bool) -> Any:
        """Call Keras's train function, which makes so many steps; ``own_data`` if each rank prepares its own samples
        only.
        """
        self._calls += 1
        if self._calls <= self._looks[0]:
            return function(batches)
        began = time.perf_counter()
        pulled = pull(batches, steps)
        taken = time.perf_counter()
        if not pulled:  # the function says so in Keras's way
            return function(batches)
        logs = function(again(batches, pulled))
        for leaf in tf.nest.flatten(logs):
            if tf.is_tensor(leaf):
                leaf.numpy()  # a GPU may still work on it
        self._found.append((taken - began, time.perf_counter() - began))
        if len(self._found) == _CALLS:
            self._judge(steps, own_data)
        return logs

    def _judge(self, steps: int, own_data: bool) -> None:
        waited, whole = (statistics.median(each) / steps for each in zip(*self._found))
        share = statistics.median(wait / both for wait, both in self._found)
        self._looks.pop(0)
        self._found.clear()
        self.is_over = not self._looks
        if waited >= LEAST_INPUT_WAIT_SECONDS and share > _SHARE:
            self.is_over = True
            _log.warning(
                "input takes %.0f ms of a step of %.0f ms (%.0f %%): rank 0 waits that long for each batch. %s",
                1e3 * waited,
                1e3 * whole,
                100 * share,
                _OWN if own_data else _WHOLE,
            )
