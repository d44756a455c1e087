"""Steps of Adam, LAMB and LARS: the formulas in numpy, with tensors and with variables."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from collective_bodies import wrong_refusals
from op_modes import MODES, evaluate
from pool import Pool

from npu_bridge.npu_init import npu_ops
from npu_bridge.tbe import npu_vector_ops
from npu_device import gen_npu_ops

G, V, M, W = np.random.default_rng(3).normal(size=[4, 2, 3])
V = np.abs(V)
LR, B1, B2, DECAY, EPSILON = 0.1, 0.9, 0.99, 0.01, 1e-6
BETAS = (B1, 1 - B1, B2, 1 - B2)
NEW_M, NEW_V = B1 * M + (1 - B1) * G, B2 * V + (1 - B2) * G**2
ADAM = NEW_M / (np.sqrt(NEW_V) + EPSILON)
LAMB = NEW_M / (1 - B1**3) / (np.sqrt(NEW_V / (1 - B2**3)) + EPSILON) + DECAY * W
NORMS = np.linalg.norm(W), np.linalg.norm(LAMB)


def body_steps(mode: str) -> None:
    def adam(g: Any, v: Any, m: Any, w: Any) -> Any:
        return gen_npu_ops.adam_apply_one_assign(g, v, m, w, LR, *BETAS, EPSILON)

    def adam_decay(g: Any, v: Any, m: Any, w: Any) -> Any:
        return gen_npu_ops.adam_apply_one_with_decay_assign(g, v, m, w, LR, *BETAS, DECAY, EPSILON)

    def lamb(g: Any, v: Any, m: Any, w: Any) -> Any:
        update, v, m = gen_npu_ops.lamb_apply_optimizer_assign(g, v, m, w, *BETAS, EPSILON, 3, 1.0, DECAY)
        return v, m, npu_vector_ops.lamb_apply_weight_assign(tf.norm(w), tf.norm(update), LR, update, w)

    for step, weights in (
        (adam, W - LR * ADAM),
        (adam_decay, W - LR * (ADAM + DECAY * W)),
        (lamb, W - NORMS[0] / NORMS[1] * LR * LAMB),
    ):
        for found in (evaluate(mode, step, G, V, M, W), _with_variables(mode, step)):
            np.testing.assert_allclose(found, [NEW_V, NEW_M, weights])
    for norms in ((0.0, 2.0), (2.0, 0.0)):
        (found,) = evaluate(mode, lambda u, w, n=norms: gen_npu_ops.lamb_apply_weight_assign(*n, LR, u, w), LAMB, W)
        np.testing.assert_allclose(found, W - LR * LAMB)


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


@pytest.mark.parametrize("mode", MODES)
def test_steps(single: Pool, mode: str) -> None:
    single.run(body_steps, mode)


def body_lars() -> list[str]:
    rate = 0.02 * NORMS[0] / (np.linalg.norm(G) + 0.1 * NORMS[0] + 1e-5)
    layer = {"input_weight": W, "input_grad": G, "weight_decay": 0.1, "hyperpara": 0.02}
    for learning_rate, clipped, factor in ((0.5, False, rate), (0.5, True, rate / 0.5), (1e-4, True, 1.0)):
        found = gen_npu_ops.lars_v2(**layer, learning_rate=learning_rate, use_clip=clipped)
        np.testing.assert_allclose(found, factor * (G + 0.1 * W))
    both = evaluate("session", lambda w, g: npu_ops.LARS([w, g], [g, w], 0.1, 0.02), W, G)
    np.testing.assert_allclose(both[0], rate * (G + 0.1 * W))
    assert len(both) == 2 and np.isfinite(both[1]).all()
    return wrong_refusals(("ValueError", "1 weights and 0 gradients", npu_ops.LARS, [W], [], 0.1))


def test_lars(single: Pool) -> None:
    assert single.run(body_lars) == [[]]
