"""Dropout by the probability to keep, its checks; the float status."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from collective_bodies import wrong_refusals
from op_modes import evaluate
from pool import Pool

from npu_bridge.estimator import npu_aicore_ops
from npu_bridge.npu_init import npu_ops
from npu_device import gen_npu_ops

COUNT = 4000


def body_dropout(mode: str) -> None:
    operation = npu_aicore_ops.dropout_v3 if mode == "eager" else npu_ops.dropout

    def with_gradient(keep_prob: Any, **options: Any) -> list[np.ndarray]:
        def call(x: Any) -> Any:
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = operation(x, keep_prob, **options)
            return y, tape.gradient(y, x)

        return evaluate(mode, call, np.full([COUNT], 3.0, np.float32))

    for keep_prob in (0.25, np.float32(0.9)):
        y, gradient = with_gradient(keep_prob)
        kept = y != 0
        np.testing.assert_allclose(y[kept], 3 / keep_prob, rtol=1e-6)
        np.testing.assert_allclose(gradient, np.where(kept, 1 / keep_prob, 0), rtol=1e-6)
        # Five standard deviations.
        assert abs(kept.mean() - keep_prob) < 5 * np.sqrt(keep_prob * (1 - keep_prob) / COUNT)
    x = np.ones([40, 50, 2], np.float32)
    one, other = evaluate(mode, lambda x: [operation(x, 0.5), operation(x, 0.5)], x)
    assert not np.array_equal(one, other)
    for noise_shape in ([40, 1, 2], (None, 1, None), np.array([40, 1, 2])):
        (rows,) = evaluate(mode, lambda x, shape=noise_shape: operation(x, 0.5, shape, seed=4), x)
        assert (rows == rows[:, :1]).all() and set(np.unique(rows)) == {0, 2}
    (by_tensor,) = evaluate(mode, operation, x, np.float32(0.25))
    assert set(np.unique(by_tensor)) == {0, 4}
    halves = evaluate(mode, lambda x: operation(x, 0.5), x.astype(np.float16))[0]
    assert halves.dtype == np.float16 and set(np.unique(halves)) == {0, 2}


@pytest.mark.parametrize("mode", ["eager", "function", "session"])
def test_dropout(single: Pool, mode: str) -> None:
    single.run(body_dropout, mode)


def body_checks() -> list[str]:
    value = "ValueError"
    wrong = wrong_refusals(("RuntimeError", "tf.function", npu_ops.dropout, tf.ones([2]), 0.5))
    with tf.Graph().as_default():
        x = tf.ones([2])
        wrong += wrong_refusals(
            (value, "int32", npu_ops.dropout, tf.ones([2], tf.int32), 0.5),
            *((value, "above 0", npu_ops.dropout, x, keep_prob) for keep_prob in (0, -0.1, 1.5, np.float32(0))),
        )
        for keep_prob in (1, 0.5, np.float64(1.0), tf.constant(0.5)):
            npu_ops.dropout(x, keep_prob)
        assert npu_ops.dropout(x, 1.0) is x
    return wrong


def test_checks(single: Pool) -> None:
    assert single.run(body_checks) == [[]]


def body_float_status(mode: str) -> dict[str, Any]:
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logging.getLogger("npu_device").addHandler(handler)

    def status(first: Any, second: Any) -> Any:
        """As loss-scaling scripts have it."""
        flag = gen_npu_ops.npu_alloc_float_status()
        gradients = [first * 2, tf.IndexedSlices(second * 2, tf.constant([0]))]
        with tf.control_dependencies(gradients):
            after = gen_npu_ops.npu_get_float_status(flag)
            newer = gen_npu_ops.npu_get_float_status_v2()
        with tf.control_dependencies([after]):
            cleared = gen_npu_ops.npu_clear_float_status(flag)
        return tf.reduce_all(tf.equal(after, cleared)), tf.reduce_all(tf.equal(newer, 0))

    good = np.ones([3], np.float32)
    results = {}
    for name, value in {"finite": 1.0, "nan": np.nan, "infinite": np.inf, "overflow": 3e38}.items():
        bad = np.array([[1.0, value]], np.float32)
        results[name] = [bool(flag) for flag in evaluate(mode, status, good, bad)]
    logging.getLogger("npu_device").removeHandler(handler)
    return {**results, "warned": any("tf.math.is_finite" in record.getMessage() for record in records)}


@pytest.mark.parametrize("mode", ["eager", "function", "session"])
def test_float_status(single: Pool, mode: str) -> None:
    (found,) = single.run(body_float_status, mode)
    overflowed = [mode == "eager"] * 2  # eagerly nothing is known of the gradients, and a warning says so
    assert found.pop("warned") == (mode == "eager")
    assert found.pop("finite") == [True, True]
    assert set(found) == {"nan", "infinite", "overflow"}
    assert all(flags == overflowed for flags in found.values())
