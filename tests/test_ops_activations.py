"""gelus, PReLU, layer norm, LARS: the formulas in numpy, eagerly, in functions and in sessions."""

from __future__ import annotations

import math
import tempfile
from typing import Any

import numpy as np
import tensorflow as tf
from op_modes import MODES, check_gradients, evaluate
from pool import Pool

import npu_device as npu
from npu_bridge.estimator import npu_aicore_ops
from npu_bridge.estimator.npu_unary_ops import npu_unary_ops
from npu_bridge.npu_init import npu_ops
from npu_device import gen_npu_ops

X = np.array([[-30.0, -3.0, -0.7, -0.1], [0.2, 0.9, 2.5, 40.0]])


def sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


def erf_gelu(x: Any) -> Any:
    return 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def body_activations() -> None:
    tanh = 0.5 * X * (1 + np.tanh(math.sqrt(2 / math.pi) * (X + 0.044715 * X**3)))
    expected = [
        (gen_npu_ops.fast_gelu, X * sigmoid(1.702 * X)),
        (npu_unary_ops.gelu, tanh),
    ]
    weights = np.array(0.25), np.array([0.1, 0.2, 0.3, 0.4])
    for operation, _ in expected:
        check_gradients(operation, X)
    for weight in weights:
        check_gradients(npu_aicore_ops.prelu, X, weight)
    for mode in MODES:
        for operation, result in expected:
            (found,) = evaluate(mode, operation, X)
            np.testing.assert_allclose(found, result, rtol=1e-7, atol=1e-12)
        for weight in weights:
            (found,) = evaluate(mode, npu_aicore_ops.prelu, X, weight)
            np.testing.assert_allclose(found, np.where(X > 0, X, weight * X))
        halves = evaluate(mode, gen_npu_ops.fast_gelu, X.astype(np.float16))[0]
        assert halves.dtype == np.float16 and np.isfinite(halves).all()


def test_activations(single: Pool) -> None:
    single.run(body_activations)


def body_npu_ops_gelu() -> dict[str, Any]:
    found = {mode: evaluate(mode, npu.ops.gelu, X)[0] for mode in ("eager", "function", "session")}
    keras = tf.keras
    inputs = keras.Input([4])
    model = keras.Model(inputs, npu.ops.gelu(npu.ops.gelu(inputs)))
    with tempfile.TemporaryDirectory() as directory:
        model.save(f"{directory}/model.keras")
        loaded = keras.models.load_model(f"{directory}/model.keras")
    sample = X.astype(np.float32)
    np.testing.assert_array_equal(model(sample), loaded(sample))
    return {**found, "model": np.array(model(sample)), "names": [layer.name for layer in model.layers]}


def test_npu_ops_gelu(keras_single: Pool) -> None:
    (found,) = keras_single.run(body_npu_ops_gelu)
    fast = X * sigmoid(1.702 * X)
    np.testing.assert_allclose(found["eager"], erf_gelu(X), atol=1e-8)
    np.testing.assert_allclose(found["function"], fast, atol=1e-12)
    np.testing.assert_allclose(found["session"], fast, atol=1e-12)
    np.testing.assert_allclose(found["model"], fast * sigmoid(1.702 * fast), rtol=1e-5, atol=1e-6)
    assert sum(name.startswith("npu.ops.gelu_") for name in found["names"]) == 2


def body_layer_norm() -> None:
    random = np.random.default_rng(1)
    x = random.normal(2.0, 3.0, [2, 3, 4])
    for norm_axis, params_axis in ((0, 0), (1, 2), (-1, -1), (2, 1)):
        gamma, beta = random.normal(size=[2, *x.shape[params_axis:]])
        axes = tuple(range(norm_axis % 3, 3))
        mean, variance = x.mean(axis=axes, keepdims=True), x.var(axis=axes, keepdims=True)
        normalised = (x - mean) / np.sqrt(variance + 1e-7)

        def norm(x: Any, gamma: Any, beta: Any, begin: Any = (norm_axis, params_axis)) -> Any:
            return npu_aicore_ops.layer_norm(x, gamma, beta, *begin)

        for mode in MODES:
            y, found_mean, found_variance = evaluate(mode, norm, x, gamma, beta)
            np.testing.assert_allclose(y, gamma * normalised + beta)
            np.testing.assert_allclose(found_mean, mean)
            np.testing.assert_allclose(found_variance, variance)
        check_gradients(lambda *arguments, norm=norm: norm(*arguments)[0], x, gamma, beta)
    # The variance is of the size of epsilon; fetched alone, and from float32, as TensorFlow's graph optimizer likes it.
    small = (x[..., :4] * 1e-4).astype(np.float32)
    spread = small - small.mean(axis=2, keepdims=True)
    right = spread / np.sqrt(np.square(spread).mean(axis=2, keepdims=True) + 1e-7)
    ones, zeros = np.ones(4, np.float32), np.zeros(4, np.float32)
    for mode in MODES:
        (found,) = evaluate(mode, lambda x: gen_npu_ops.layer_norm(x, ones, zeros, 2, 2)[0], small)
        np.testing.assert_allclose(found, right, rtol=1e-3, atol=1e-5)
    large = (x * 300).astype(np.float16)  # its squares overflow float16
    y, _, _ = gen_npu_ops.fused_layer_norm(large, np.ones(4, np.float16), np.zeros(4, np.float16), 2, 2)
    assert y.dtype == tf.float16 and abs(np.std(y[0, 0]) - 1) < 0.01


def test_layer_norm(single: Pool) -> None:
    single.run(body_layer_norm)


def body_lars() -> str:
    random = np.random.default_rng(2)
    w, g = random.normal(size=[2, 5, 3])
    rate = 0.02 * np.linalg.norm(w) / (np.linalg.norm(g) + 0.1 * np.linalg.norm(w) + 1e-5)
    for mode in MODES:
        for learning_rate, use_clip, factor in ((0.5, False, rate), (0.5, True, rate / 0.5), (1e-4, True, 1.0)):
            (found,) = evaluate(
                mode,
                lambda w, g, lr=learning_rate, clip=use_clip: gen_npu_ops.lars_v2(
                    input_weight=w, input_grad=g, weight_decay=0.1, learning_rate=lr, hyperpara=0.02, use_clip=clip
                ),
                w,
                g,
            )
            np.testing.assert_allclose(found, factor * (g + 0.1 * w))
        both = evaluate(mode, lambda w, g: npu_ops.LARS([w, g], [g, w], 0.1, 0.02), w, g)
        np.testing.assert_allclose(both[0], rate * (g + 0.1 * w))
        assert np.isfinite(both[1]).all() and len(both) == 2
    try:
        npu_ops.LARS([w], [], 0.1)
    except ValueError as error:
        return str(error)
    return "accepted"


def test_lars(single: Pool) -> None:
    assert "1 weights and 0 gradients" in single.run(body_lars)[0]
