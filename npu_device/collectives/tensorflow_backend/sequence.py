"""The position of each collective in the sequence of its group's collectives: TensorFlow's instance key, the same in
every member.

The number is drawn when the operation runs, from a counter in TensorFlow. Fixed while a tf.function is traced it would
differ as soon as one rank traces again and another doesn't; TensorFlow's own way of feeding it at each call
(``capture_call_time_value``) fails for a function that is called in a loop or a branch, as Keras 3 does with
``steps_per_execution`` (seen with TensorFlow 2.20). Operations on one resource run in program order, in loops too, so
that every rank draws the same number for the same operation.
"""

from __future__ import annotations

import weakref

import tensorflow as tf

from npu_device import _compat
from npu_device.cluster.runtime import Runtime
from npu_device.collectives.group import Group

_FIRST_KEY = 1
_LARGEST_KEY = 0x7FFFFFFF
_LANES = 16


class Sequence:
    """The counter of one group in one of its members."""

    def __init__(self, runtime: Runtime) -> None:
        with tf.init_scope(), tf.device(runtime.device("CPU")):
            self._counter = _compat.plain_variable(tf.constant(_FIRST_KEY, tf.int32))
            self._lanes = [_compat.plain_variable(tf.constant(0, tf.int32)) for _ in range(_LANES)]
        self._used = 0

    def draw(self) -> tf.Tensor:
        """The next number: int32, shape []. An operation of the graph in a tf.function, a value in eager mode."""
        return tf.raw_ops.ResourceCountUpTo(resource=self._counter.handle, limit=_LARGEST_KEY, T=tf.int32)

    def lane(self, apart: bool) -> tf.Tensor:
        """A resource by which TensorFlow orders operations: another one at each call, or always the same."""
        if not apart:
            return self._lanes[0].handle
        self._used += 1
        return self._lanes[1 + self._used % (_LANES - 1)].handle

    def touch(self) -> None:
        """An operation that TensorFlow keeps in a graph, in the group's own order."""
        self._lanes[0].assign_add(0, read_value=False)


_sequences: weakref.WeakKeyDictionary[Runtime, dict[Group, Sequence]] = weakref.WeakKeyDictionary()


def sequence_of(runtime: Runtime, group: Group) -> Sequence:
    """The sequence of a group, begun at its first use. A group that is destroyed and made again goes on counting."""
    sequences = _sequences.setdefault(runtime, {})
    if group not in sequences:
        sequences[group] = Sequence(runtime)
    return sequences[group]
