"""Run Python inside ``session.run`` without holding one of TensorFlow's threads.

``tf.numpy_function`` alone keeps a thread of the session's pool while it waits. On a machine with few cores the pool
has one or two, and two ranks waiting in different operations would never reach the one the other waits for.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf


class _Functions(list[Callable[..., Any]]):
    """The Python functions that one graph calls with values of the same dtypes."""

    def call(self, number: np.ndarray, *values: np.ndarray) -> Any:
        """Call the function of a number with values, and return its results."""
        return self[int(number)](*values)


_SharedFunction = tuple[str, "weakref.ref[_Functions]"]
"""The name of a function of a graph's library, and the Python functions that it calls. The graph keeps both alive."""

_shared: weakref.WeakKeyDictionary[tf.Graph, dict[Any, _SharedFunction]] = weakref.WeakKeyDictionary()


@tf.autograph.experimental.do_not_convert
def call_python(
    function: Callable[..., Any], tensors: Sequence[tf.Tensor], specs: Sequence[tf.TensorSpec]
) -> list[tf.Tensor]:
    """Add an operation to the graph that calls a Python function outside of the session's threads.

    Args:
        function: called with the values as numpy arrays; returns a list of arrays, one for each spec. What it raises is
            an error of ``session.run``.
        tensors: the values.
        specs: shapes and dtypes of the results, at least one.

    Returns:
        The results.
    """
    dtypes, shapes = [spec.dtype for spec in specs], [spec.shape for spec in specs]
    name, reference = _shared_function([tensor.dtype for tensor in tensors], dtypes)
    functions = reference()
    assert functions is not None  # the graph has them
    functions.append(function)
    inputs = [tf.constant(len(functions) - 1, tf.int64), *tensors]
    # Reading the only element of a data set is an asynchronous operation with its own thread, which also runs the data
    # set's function.
    one = tf.raw_ops.TensorDataset(components=inputs, output_shapes=[tensor.shape for tensor in inputs])
    mapped = tf.raw_ops.MapDataset(
        input_dataset=one,
        other_arguments=[],
        f=name,
        output_types=dtypes,
        output_shapes=[None] * len(dtypes),
        use_inter_op_parallelism=False,
        preserve_cardinality=True,
    )
    return list(tf.raw_ops.DatasetToSingleElement(dataset=mapped, output_types=dtypes, output_shapes=shapes))


def _shared_function(inputs: Sequence[tf.DType], outputs: Sequence[tf.DType]) -> _SharedFunction:
    """Return the default graph's function for values and results of some dtypes, made at its first use: a separate
    function for each would cost a graph's first run more than the rest of the operation.
    """
    graph = tf.compat.v1.get_default_graph()
    made = _shared.setdefault(graph, {})
    key = (*inputs, None, *outputs)
    if key not in made:
        functions = _Functions()

        def body(*values: tf.Tensor) -> Any:
            return tf.numpy_function(functions.call, list(values), list(outputs))

        specs = [tf.TensorSpec([], tf.int64), *(tf.TensorSpec(None, dtype) for dtype in inputs)]
        # Enter it again, so that TensorFlow finds the session's graph around the function. It would find eager mode
        # if anything ran before that was switched off, and place the function on the device of the job's task,
        # which no session has (``tf.numpy_function`` names the device of the eager context, TensorFlow 2.20). Can
        # go when it names none in a graph.
        with _outermost(graph).as_default():
            concrete = tf.function(body, autograph=False).get_concrete_function(*specs)
        concrete.add_to_graph(graph)
        made[key] = tf.compat.as_str(concrete.name), weakref.ref(functions)
    return made[key]


def _outermost(graph: tf.Graph) -> tf.Graph:
    """Return the session's graph, given that graph or the graph of a function, branch or loop in it."""
    while hasattr(graph, "outer_graph"):
        graph = graph.outer_graph
    return graph
