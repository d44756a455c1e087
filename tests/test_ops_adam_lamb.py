"""Steps of Adam and LAMB: the formulas in numpy, with tensors and with variables."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from op_modes import evaluate
from pool import Pool

from npu_bridge.tbe import npu_vector_ops
from npu_device import gen_npu_ops

G, V, M, W = np.random.default_rng(3).normal(size=[4, 2, 3])
V = np.abs(V)
LR, B1, B2, DECAY, EPSILON = 0.1, 0.9, 0.99, 0.01, 1e-6
BETAS = (B1, 1 - B1, B2, 1 - B2)
NEW_M, NEW_V = B1 * M + (1 - B1) * G, B2 * V + (1 - B2) * G**2
ADAM = NEW_M / (np.sqrt(NEW_V) + EPSILON)
LAMB = NEW_M / (1 - B1**3) / (np.sqrt(NEW_V / (1 - B2**3)) + EPSILON)


def body_steps(mode: str) -> None:
    def adam(g: Any, v: Any, m: Any, w: Any) -> Any:
        return gen_npu_ops.adam_apply_one_assign(g, v, m, w, LR, *BETAS, EPSILON)

    def adam_decay(g: Any, v: Any, m: Any, w: Any) -> Any:
        return gen_npu_ops.adam_apply_one_with_decay_assign(g, v, m, w, LR, *BETAS, DECAY, EPSILON)

    def lamb(g: Any, v: Any, m: Any, w: Any) -> Any:
        update, v, m = gen_npu_ops.lamb_apply_optimizer_assign(g, v, m, w, *BETAS, EPSILON, 3, 1.0, DECAY)
        return update, v, m, npu_vector_ops.lamb_apply_weight_assign(tf.norm(w), tf.norm(update), LR, update, w)

    update = LAMB + DECAY * W
    lamb_w = W - np.linalg.norm(W) / np.linalg.norm(update) * LR * update
    expected = [
        (adam, [NEW_V, NEW_M, W - LR * ADAM]),
        (adam_decay, [NEW_V, NEW_M, W - LR * (ADAM + DECAY * W)]),
        (lamb, [update, NEW_V, NEW_M, lamb_w]),
    ]
    for step, results in expected:
        for found, result in zip(evaluate(mode, step, G, V, M, W), results):
            np.testing.assert_allclose(found, result)
        for found, result in zip(_with_variables(mode, step), results[-3:] if step is not lamb else results[1:]):
            np.testing.assert_allclose(found, result)
    for norms in ((0.0, 2.0), (2.0, 0.0)):
        (found,) = evaluate(mode, lambda u, w, n=norms: gen_npu_ops.lamb_apply_weight_assign(*n, LR, u, w), update, W)
        np.testing.assert_allclose(found, W - LR * update)


def _with_variables(mode: str, step: Any) -> list[np.ndarray]:
    """The variables v, m and w after the step, of which only the last result is asked for."""
    if mode == "session":
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            variables = [tf.Variable(value) for value in (V, M, W)]
            last = step(tf.constant(G), *variables)[-1]
            session.run(tf.compat.v1.global_variables_initializer())
            session.run(last)
            return list(session.run(variables))
    variables = [tf.Variable(value) for value in (V, M, W)]
    (tf.function(step) if mode == "function" else step)(tf.constant(G), *variables)
    return [variable.numpy() for variable in variables]


@pytest.mark.parametrize("mode", ["eager", "function", "session"])
def test_steps(single: Pool, mode: str) -> None:
    single.run(body_steps, mode)
