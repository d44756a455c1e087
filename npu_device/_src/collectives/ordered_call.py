"""Call Python from a graph in program order: in a ``tf.function``, its branches and its loops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Callable

import tensorflow as tf

from npu_device._src import compat
from npu_device._src.collectives.python_call import python_call


class Order:
    """One order of calls: each call runs after all earlier ones of the same order.

    Args:
        device: the name of this process's CPU.
    """

    def __init__(self, device: str) -> None:
        with tf.init_scope(), tf.device(device):
            self._variable = compat.plain_variable(tf.constant(0, tf.int64))

    def call(
        self, function: Callable[..., Sequence[Any]], inputs: Sequence[tf.Tensor], dtypes: Sequence[tf.DType]
    ) -> list[tf.Tensor]:
        """Add an operation to the graph that calls a Python function; TensorFlow never prunes it.

        Args:
            function: called with the inputs as numpy arrays; returns one array for each dtype.
            inputs: its inputs.
            dtypes: the dtypes of its results.

        To TensorFlow the operation has no state, or it would be ordered with all other stateful operations. It takes
        the number in the order's variable and returns it, to be written back: TensorFlow keeps reads and writes of a
        variable in order, and operations connected by data can't be optimised away.
        """

        def in_order(number: Any, *arrays: Any) -> list[Any]:
            return [number, *function(*arrays)]

        variable = compat.through_outer_graphs(self._variable.handle)
        number = tf.raw_ops.ReadVariableOp(resource=variable, dtype=tf.int64)
        done, *results = python_call(in_order, [number, *inputs], [tf.int64, *dtypes])
        tf.raw_ops.AssignVariableOp(resource=variable, value=done)
        return list(results)
