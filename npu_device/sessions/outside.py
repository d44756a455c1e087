"""Python that runs inside ``session.run`` without holding one of TensorFlow's threads.

``tf.numpy_function`` alone keeps a thread of the session's pool while it waits. On a machine with few cores the pool
has one or two, and two ranks that wait in different operations would never come to the one that the other waits for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf


def in_session_graph() -> bool:
    """True while a graph for a session is built, in its functions, branches and loops too; False in eager mode and in a
    ``tf.function`` that eager code calls.
    """
    return not tf.compat.v1.executing_eagerly_outside_functions()


@tf.autograph.experimental.do_not_convert
def run_outside(
    function: Callable[..., Any], tensors: Sequence[tf.Tensor], specs: Sequence[tf.TensorSpec]
) -> list[tf.Tensor]:
    """Add an operation to the graph that calls a Python function in a thread of its own.

    Args:
        function: called with the values as numpy arrays; returns a list of arrays, one a spec. What it raises is an
            error of ``session.run``.
        tensors: the values, at least one.
        specs: shapes and dtypes of the results, at least one.

    Returns:
        The results.
    """

    dtypes, shapes = [spec.dtype for spec in specs], [spec.shape for spec in specs]

    @tf.autograph.experimental.do_not_convert
    def body(*values: tf.Tensor) -> tuple[tf.Tensor, ...]:
        return tuple(tf.numpy_function(function, list(values), dtypes))

    # Reading one element of a data set is an asynchronous operation, and the data set brings its own thread for the
    # function.
    elements = tf.data.Dataset.from_tensors(tuple(tensors)).map(body)
    variant = tf.data.experimental.to_variant(elements)
    threads = tf.raw_ops.PrivateThreadPoolDataset(
        input_dataset=variant, num_threads=1, output_types=dtypes, output_shapes=shapes
    )
    return list(tf.raw_ops.DatasetToSingleElement(dataset=threads, output_types=dtypes, output_shapes=shapes))
