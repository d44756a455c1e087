"""Runs an operation eagerly, in a tf.function and in a TensorFlow 1 graph, with its gradients; for test_ops_*.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Callable

import numpy as np
import tensorflow as tf

MODES = ("eager", "function", "session")


def _as_list(results: Any) -> list[Any]:
    return list(results) if isinstance(results, (list, tuple)) else [results]


def _with_gradients(function: Callable[..., Any], inputs: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Results, and the gradients of their weighted sum (they differ, so that no two elements can be mixed up)."""
    with tf.GradientTape() as tape:
        tape.watch(inputs)
        results = _as_list(function(*inputs))
        loss = tf.add_n([tf.reduce_sum(result * _weights(result)) for result in results])
    return results, tape.gradient(loss, inputs)


def _weights(result: Any) -> Any:
    count = tf.size(result, out_type=tf.int32)
    return tf.reshape(tf.cos(tf.cast(tf.range(count), result.dtype)), tf.shape(result))


def evaluate(mode: str, function: Callable[..., Any], *arrays: Any) -> list[np.ndarray]:
    """Return the results of ``function`` for the arrays, a list of numpy arrays."""
    if mode == "session":
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            inputs = [tf.compat.v1.placeholder(array.dtype, array.shape) for array in arrays]
            return list(session.run(_as_list(function(*inputs)), dict(zip(inputs, arrays))))
    call = tf.function(function) if mode == "function" else function
    return [result.numpy() for result in _as_list(call(*[tf.constant(array) for array in arrays]))]


def check_gradients(function: Callable[..., Any], *arrays: Any, modes: Sequence[str] = MODES) -> None:
    """The gradients of all (float64) arrays are those of central differences."""

    def both(*inputs: Any) -> list[Any]:
        results, gradients = _with_gradients(function, inputs)
        total = tf.add_n([tf.reduce_sum(result * _weights(result)) for result in results])
        return [total, *[tf.convert_to_tensor(gradient) for gradient in gradients]]

    step = 1e-6
    call = tf.function(both)
    found = {mode: evaluate(mode, both, *arrays)[1:] for mode in modes}
    for which, array in enumerate(arrays):
        differences = np.empty_like(array)
        for place in np.ndindex(array.shape):
            losses = []
            for shift in (step, -step):
                shifted = [np.array(each) for each in arrays]
                shifted[which][place] += shift
                losses.append(float(call(*[tf.constant(each) for each in shifted])[0]))
            differences[place] = (losses[0] - losses[1]) / (2 * step)
        for mode, gradients in found.items():
            what = f"argument {which} in {mode}"
            np.testing.assert_allclose(gradients[which], differences, rtol=1e-5, atol=1e-6, err_msg=what)
