"""When the ranks look at what they train: in steps 4, 7, 10 and 20, and then at an interval on which all of them agree.

A step counts, and does nothing else until a look is due. In a graph the look is a branch. What it compares enters the
branch as reads of the graph, so that TensorFlow lets later writes of the same variables wait, and earlier ones finish
before. Nothing is read from another thread, or by Python while a step runs.
"""

from __future__ import annotations

import functools
from typing import Any, Callable

import numpy as np
import tensorflow as tf

from npu_device._src import compat
from npu_device._src.collectives.graph import step_data
from npu_device._src.threads import ThreadSwitch

FIRST_LOOKS = (4, 7, 10, 20)
NEVER = 1 << 62

only_building = ThreadSwitch()
"""Lets a thread compare and reduce nothing of steps, which are only traced to make variables."""


def can_compare() -> bool:
    """Return whether the ranks can compare what belongs to the step that is built, for which they need eager mode."""
    return tf.compat.v1.executing_eagerly_outside_functions() and not only_building.is_on


def next_look(count: int, after: int) -> int:
    """Return the step of the first look after a step, given an interval for those after the first ones."""
    return min([step for step in FIRST_LOOKS if step > count] or [count + after])


class Schedule:
    """Counts steps, those of graphs apart from eager ones. ``device`` is the name of the CPU of this process."""

    def __init__(self, device: str, first_look: int) -> None:
        self._count = 0
        self._due = first_look
        self._device = device
        self._first_look = first_look

    def is_due(self) -> bool:
        """Return whether the next eager step looks."""
        # One more, since the step that is about to begin counts.
        return self._count + 1 >= self._due

    def step(self, look: Callable[[Any], Any]) -> None:
        """Count a step, now or when the graph that is built runs, and look if it is time.

        ``look`` takes the number of the step, an integer or a tensor (int64, shape []), and returns the number
        of the step in which to look next. In a graph it builds a branch.
        """
        if tf.executing_eagerly():
            is_due = self.is_due()
            self._count += 1
            if is_due:
                self._due = int(look(np.int64(self._count)))
            return
        overdue, due = self._in_graphs
        # A step that ends for lack of data must count on no rank.
        with tf.device(self._device), tf.control_dependencies(step_data()):
            # Counts up from minus the number of steps until the look, and returns it before this step is counted.
            earlier = tf.raw_ops.ResourceCountUpTo(resource=overdue.handle, limit=NEVER, T=tf.int64)

        def look_now() -> tf.Tensor:
            count = due.read_value() + earlier + 1
            next_due = look(count)
            due.assign(next_due, read_value=False)
            overdue.assign(count - next_due, read_value=False)
            return next_due

        with tf.device(self._device):
            looked = tf.cond(earlier >= -1, look_now, lambda: tf.constant(0, tf.int64))
        # Otherwise TensorFlow would run an operation for each variable of the branch in every step.
        if not tf.config.get_visible_devices("GPU"):
            compat.keep_whole(looked)

    @functools.cached_property
    def _in_graphs(self) -> tuple[Any, Any]:
        """Return two variables: minus the number of steps until the next look, and the step of that."""
        with tf.init_scope(), tf.device(self._device):
            due = compat.plain_variable(tf.constant(self._first_look, tf.int64))
            overdue = compat.plain_variable(tf.constant(-self._first_look, tf.int64))
            return overdue, due
