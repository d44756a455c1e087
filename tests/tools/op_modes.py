"""Runs an operation eagerly, in a tf.function and in a TensorFlow 1 graph, and checks gradients; for test_ops_*.py."""

from __future__ import annotations

from typing import Any, Callable

import numpy as np
import tensorflow as tf

MODES = ("eager", "function", "session")
_STEP = 1e-6


def _as_list(results: Any) -> list[Any]:
    return list(results) if isinstance(results, (list, tuple)) else [results]


def _weighted_sum(result: Any) -> Any:
    """The weights differ, so that no two elements can be mixed up."""
    numbers = tf.range(tf.size(result, out_type=tf.int32))
    return tf.reduce_sum(
        result * tf.reshape(tf.cos(tf.cast(numbers, result.dtype)), tf.shape(result))
    )


def evaluate(mode: str, function: Callable[..., Any], *arrays: Any) -> list[np.ndarray]:
    """Return the results of ``function`` for the arrays, a list of numpy arrays."""
    if mode == "session":
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            inputs = [tf.compat.v1.placeholder(array.dtype, array.shape) for array in arrays]
            return list(session.run(_as_list(function(*inputs)), dict(zip(inputs, arrays))))
    call = tf.function(function) if mode == "function" else function
    return [result.numpy() for result in _as_list(call(*map(tf.constant, arrays)))]


def check_gradients(function: Callable[..., Any], *arrays: Any) -> None:
    """The gradients of all (float64) arrays, along a random direction, are central differences."""

    @tf.function
    def both(*inputs: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            loss = tf.add_n([_weighted_sum(result) for result in _as_list(function(*inputs))])
        return loss, tape.gradient(loss, inputs)

    _, gradients = both(*map(tf.constant, arrays))
    for which, array in enumerate(arrays):
        direction = np.random.default_rng(which).normal(size=array.shape)
        moved = (
            [*arrays[:which], array + step * direction, *arrays[which + 1 :]]
            for step in (_STEP, -_STEP)
        )
        ahead, behind = (float(both(*map(tf.constant, each))[0]) for each in moved)
        slope = np.sum(gradients[which] * direction)
        np.testing.assert_allclose(
            slope, (ahead - behind) / (2 * _STEP), 1e-5, 1e-6, err_msg=f"argument {which}"
        )


def check_gradient_operator(
    mode: str,
    operator: Callable[..., Any],
    incoming: Any,
    gradients: Callable[..., Any],
    *arrays: Any,
) -> None:
    """``gradients`` gives what TensorFlow finds for the arrays from the gradients of the operator's results."""

    def by_tensorflow(*inputs: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            results = _as_list(operator(*inputs))
        return tape.gradient(results, inputs, list(map(tf.constant, incoming)))

    expected = evaluate("eager", by_tensorflow, *arrays)
    found = evaluate(mode, gradients, *arrays)
    assert len(found) == len(expected)
    for which, (one, other) in enumerate(zip(found, expected)):
        np.testing.assert_allclose(one, other, rtol=1e-7, atol=1e-10, err_msg=f"argument {which}")
