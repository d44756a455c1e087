"""Call Python from the graph of a ``tf.function``, keeping nothing once that graph is gone.

``tf.numpy_function`` keeps the Python function, and with it 2 to 7 KB, for as long as the process lives: it hangs it on
the outermost graph, which for a ``tf.function`` is the process's default graph (TensorFlow 2.20,
``script_ops._internal_py_func``). A script that retraces would grow forever. Here all calls share one such function,
which finds the one to run by a number, and the number is an eager tensor that the graph captures: whatever can run the
graph holds the tensor, and when the tensor goes, so does the function. Can go when ``tf.numpy_function`` releases the
function with the graph that calls it.

``Order`` runs calls in program order, also in branches and loops.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Sequence
from typing import Any, Callable

import numpy as np
import tensorflow as tf

from npu_device._src import compat

_CAPTURED_FROM = 129
"""Elements. TensorFlow copies a smaller eager tensor into the graph as a constant, and doesn't hold the tensor."""

_functions: dict[int, Callable[..., Any]] = {}
_numbers = itertools.count()


def python_call(function: Callable[..., Any], inputs: Sequence[tf.Tensor], dtypes: Sequence[tf.DType]) -> Any:
    """Add an operation to the graph of a ``tf.function`` that calls a Python function.

    Args:
        function: called with the inputs as numpy arrays; returns a list of arrays, one for each dtype. It must not
            refer to tensors of the graph.
        inputs: its inputs.
        dtypes: the dtypes of its results, whose shapes are unknown.

    Returns:
        The results as a list; the operation, if there are none.
    """
    number = next(_numbers)
    with tf.init_scope(), tf.device("CPU:0"):
        captured = tf.fill([_CAPTURED_FROM], np.int64(number))  # see compat.to_tensor
    _functions[number] = function
    weakref.finalize(captured, _functions.pop, number, None)
    inputs = [compat.through_outer_graphs(captured), *inputs]
    return tf.raw_ops.PyFuncStateless(input=inputs, token=_registered(), Tout=list(dtypes))


class Order:
    """One order of calls: each call runs after all earlier ones of the same order.

    Args:
        device: the name of this process's CPU.
    """

    def __init__(self, device: str) -> None:
        with tf.init_scope(), tf.device(device):
            self._variable = compat.plain_variable(tf.constant(0, tf.int64))

    def call(
        self, function: Callable[..., Sequence[Any]], inputs: Sequence[tf.Tensor], dtypes: Sequence[tf.DType] = ()
    ) -> list[tf.Tensor]:
        """Add an operation to the graph that calls a Python function; TensorFlow never prunes it.

        Args:
            function: called with the inputs as numpy arrays; returns an int64, and one array for each dtype.
            inputs: its inputs.
            dtypes: the dtypes of its results but for the first one, which is an int64.

        To TensorFlow the operation has no state, or it would be ordered with all other stateful operations. It takes
        the number in the order's variable, and its first result is written there: TensorFlow keeps reads and writes of
        a variable in order, and operations connected by data can't be optimised away. A result that only serves for
        this would cost 10 µs.
        """

        def in_order(_: Any, *arrays: Any) -> Sequence[Any]:
            return function(*arrays)

        variable = compat.through_outer_graphs(self._variable.handle)
        number = tf.raw_ops.ReadVariableOp(resource=variable, dtype=tf.int64)
        results = python_call(in_order, [number, *inputs], [tf.int64, *dtypes])
        tf.raw_ops.AssignVariableOp(resource=variable, value=results[0])
        return list(results)


def call_now(function: Callable[..., list[Any]], inputs: Sequence[Any], specs: Sequence[tf.TensorSpec]) -> list[Any]:
    """Call a Python function with arrays, at once or in the graph that is built now, in no order but that of its data.

    Args:
        function: returns a list of arrays, one for each spec. It lives as long as the graph, and must not refer to it.
        inputs: the arguments, at least one.
        specs: shapes and dtypes of the results.
    """
    tensors = [tf.convert_to_tensor(value) for value in inputs]
    if tf.executing_eagerly():
        return [tf.constant(result) for result in function(*map(compat.to_array, tensors))]
    results = python_call(function, tensors, [spec.dtype for spec in specs])
    for result, spec in zip(results, specs):
        result.set_shape(spec.shape)
    return list(results)


def _call(captured: Any, *arrays: Any) -> Any:
    return _functions[int(captured[0])](*arrays)


@functools.cache
def _graph() -> tf.Graph:
    """Return a graph with a call of ``_call``: TensorFlow keeps a function registered while its graph lives."""
    with tf.Graph().as_default() as graph:
        tf.numpy_function(_call, [tf.constant([0])], [], name="call")
    return graph


def _registered() -> bytes:
    token: bytes = _graph().get_operation_by_name("call").get_attr("token")
    return token
