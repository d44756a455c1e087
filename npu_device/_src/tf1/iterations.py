"""Several training steps in one ``session.run``, as an NPU makes them."""

from __future__ import annotations

import operator
import weakref
from typing import Any

import numpy as np
import tensorflow as tf

from npu_device._src.collectives.sessions import call_python


class IterationPerLoop:
    """An operation that runs another one several times; the number is set later.

    Source: Ascend TF Adapter 1.15, ``util.IterationPerLoop``.
    """

    def __init__(self) -> None:
        self._session: Any = None
        self._steps = 1

    def create_iteration_per_loop_var(self, train_op: Any) -> Any:
        """Return the operation for ``session.run``.

        Args:
            train_op: an operation that makes one step; it gets its data from an iterator or a variable, since what is
                fed to the outer ``session.run`` does not reach it.

        Returns:
            An operation named "IterationOp". Anything else fetched together with it is computed once more, in addition
            to the steps.

        Raises:
            ValueError: ``train_op`` is not an operation.
        """
        _require_operation(train_op)

        def steps() -> list[np.ndarray]:
            for _step in range(self._steps):
                self._session.run(train_op)
            return [np.array(self._steps, np.int64)]

        _made.setdefault(train_op.graph, weakref.WeakSet()).add(self)
        with train_op.graph.as_default():
            [made] = call_python(steps, [], [tf.TensorSpec([], tf.int64)])
            with tf.control_dependencies([made]):
                return tf.no_op(name="IterationOp")

    def load_iteration_per_loop_var(self, sess: Any, iterations_per_loop: int = 1) -> None:
        """Set how many steps the operation makes, and in which session.

        Args:
            sess: the session that will run it.
            iterations_per_loop: number of steps, from 1.

        Raises:
            ValueError: another number.
        """
        self._session, self._steps = sess, _checked(iterations_per_loop)


# Weak on both sides: a loop knows its session, which knows the graph. The operation keeps the loop alive.
_made: weakref.WeakKeyDictionary[tf.Graph, weakref.WeakSet[IterationPerLoop]] = weakref.WeakKeyDictionary()


def load_all(session: Any, iterations_per_loop: int) -> None:
    for loop in _made.get(session.graph, ()):
        loop.load_iteration_per_loop_var(session, iterations_per_loop)


def set_iteration_per_loop(sess: Any, train_op: Any, iterations_per_loop: int = 1) -> Any:
    """Return an operation that makes several training steps in one ``session.run``.

    Args:
        sess: the session that will run it.
        train_op: an operation that makes one step, see ``IterationPerLoop``.
        iterations_per_loop: number of steps, from 1.

    Returns:
        An operation named "IterationOp"; ``train_op`` itself for one step.

    Raises:
        ValueError: ``train_op`` is not an operation; another number of steps.

    Source: Ascend TF Adapter 1.15, ``util.set_iteration_per_loop``.
    """
    _require_operation(train_op)
    if _checked(iterations_per_loop) == 1:
        return train_op
    loop = IterationPerLoop()
    made = loop.create_iteration_per_loop_var(train_op)
    loop.load_iteration_per_loop_var(sess, iterations_per_loop)
    return made


def _require_operation(train_op: Any) -> None:
    if not isinstance(train_op, tf.Operation):
        raise ValueError(f"train_op must be a tf.Operation; found type {type(train_op).__name__}: pass tensor.op")


def _checked(iterations_per_loop: int) -> int:
    try:
        steps = operator.index(iterations_per_loop)
    except TypeError:
        steps = 0
    if steps < 1:
        raise ValueError(f"iterations_per_loop must be a whole number from 1; found {iterations_per_loop!r}")
    return steps
