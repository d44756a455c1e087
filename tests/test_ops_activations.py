"""Gelus, PReLU, layer norm, dropout, the float status, steps of Adam, LAMB and LARS: the formulas in numpy; the names
by which scripts reach them.
"""

from __future__ import annotations

import math
import tempfile
from typing import Any, Callable

import numpy as np
import pytest
import tensorflow as tf
from caught_messages import hears
from collective_bodies import wrong_refusals
from op_modes import MODES, check_gradients, evaluate
from pool import Pool

import npu_device as npu
from npu_bridge.estimator import npu_aicore_ops
from npu_bridge.estimator.npu_unary_ops import npu_unary_ops
from npu_bridge.hccl import hccl_ops
from npu_bridge.npu_cpu import npu_cpu_ops
from npu_bridge.npu_init import npu_ops
from npu_bridge.tbe import npu_vector_ops
from npu_bridge.tbe.npu_cube_ops import deformable_conv2d
from npu_device import gen_npu_ops

X = np.array([[-30.0, -3.0, -0.7, -0.1], [0.2, 0.9, 2.5, 40.0]])
COUNT = 4000

G, V, M, W = np.random.default_rng(3).normal(size=[4, 2, 3])
V = np.abs(V)
LR, B1, B2, DECAY, EPSILON = 0.1, 0.9, 0.99, 0.01, 1e-6
BETAS = (B1, 1 - B1, B2, 1 - B2)
NEW_M, NEW_V = B1 * M + (1 - B1) * G, B2 * V + (1 - B2) * G**2
ADAM = NEW_M / (np.sqrt(NEW_V) + EPSILON)
LAMB = NEW_M / (1 - B1**3) / (np.sqrt(NEW_V / (1 - B2**3)) + EPSILON) + DECAY * W
NORMS = np.linalg.norm(W), np.linalg.norm(LAMB)


def fast_gelu(x: Any) -> Any:
    return x / (1 + np.exp(-1.702 * x))


def body_activations() -> None:
    tanh = 0.5 * X * (1 + np.tanh(math.sqrt(2 / math.pi) * (X + 0.044715 * X**3)))
    slopes = (np.array(0.25), np.array([0.1, 0.2, 0.3, 0.4]))
    for operation, result, *weights in (
        (gen_npu_ops.fast_gelu, fast_gelu(X)),
        (npu_unary_ops.gelu, tanh),
        *((npu_aicore_ops.prelu, np.where(X > 0, X, slope * X), slope) for slope in slopes),
    ):
        check_gradients(operation, X, *weights)
        for mode in MODES:
            np.testing.assert_allclose(
                evaluate(mode, operation, X, *weights)[0], result, rtol=1e-7, atol=1e-12
            )
    halves = gen_npu_ops.fast_gelu(X.astype(np.float16))
    assert halves.dtype == tf.float16 and np.isfinite(halves).all()


def body_npu_ops_gelu() -> None:
    fast = fast_gelu(X)
    by_erf = 0.5 * X * (1 + np.vectorize(math.erf)(X / math.sqrt(2)))
    for mode, result in (("eager", by_erf), ("function", fast), ("session", fast)):
        np.testing.assert_allclose(evaluate(mode, npu.ops.gelu, X)[0], result, atol=1e-8)
    inputs = tf.keras.Input([4])
    model = tf.keras.Model(inputs, npu.ops.gelu(npu.ops.gelu(inputs)))
    with tempfile.TemporaryDirectory() as directory:
        model.save(f"{directory}/model.keras")
        loaded = tf.keras.models.load_model(f"{directory}/model.keras")
    sample = X.astype(np.float32)
    np.testing.assert_array_equal(model(sample), loaded(sample))
    np.testing.assert_allclose(model(sample), fast_gelu(fast), rtol=1e-5, atol=1e-6)
    assert sum(layer.name.startswith("npu.ops.gelu_") for layer in model.layers) == 2


def test_npu_ops_gelu(keras_single: Pool) -> None:
    keras_single.run(body_npu_ops_gelu)


def body_layer_norm() -> None:
    random = np.random.default_rng(1)
    x = random.normal(2.0, 3.0, [2, 3, 4])
    for norm_axis, params_axis in ((0, 0), (1, 2), (-1, -1), (2, 1)):
        gamma, beta = random.normal(size=[2, *x.shape[params_axis:]])
        axes = tuple(range(norm_axis % 3, 3))
        mean, variance = x.mean(axis=axes, keepdims=True), x.var(axis=axes, keepdims=True)
        expected = (gamma * (x - mean) / np.sqrt(variance + 1e-7) + beta, mean, variance)

        def norm(x: Any, gamma: Any, beta: Any, begin: Any = (norm_axis, params_axis)) -> Any:
            return npu_aicore_ops.layer_norm(x, gamma, beta, *begin)

        for mode in MODES[1:]:
            for found, right in zip(evaluate(mode, norm, x, gamma, beta), expected):
                np.testing.assert_allclose(found, right)
    check_gradients(lambda *arguments: norm(*arguments)[0], x, gamma, beta)
    # The variance is of the size of epsilon; fetched alone, and from float32, as TensorFlow's graph optimizer likes it.
    small = (x * 1e-4).astype(np.float32)
    spread = small - small.mean(axis=2, keepdims=True)
    right = spread / np.sqrt(np.square(spread).mean(axis=2, keepdims=True) + 1e-7)
    for mode in MODES:
        (found,) = evaluate(
            mode, lambda x: gen_npu_ops.layer_norm(x, np.ones(4), np.zeros(4), 2, 2)[0], small
        )
        np.testing.assert_allclose(found, right, rtol=1e-3, atol=1e-5)
    large = (x * 300).astype(np.float16)  # its squares overflow float16
    y, _, _ = gen_npu_ops.fused_layer_norm(
        large, np.ones(4, np.float16), np.zeros(4, np.float16), 2, 2
    )
    assert y.dtype == tf.float16 and abs(np.std(y[0, 0]) - 1) < 0.01


def body_dropout(mode: str) -> None:
    operation = npu_aicore_ops.dropout_v3 if mode == "eager" else npu_ops.dropout

    def with_gradient(x: Any, keep_prob: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = operation(x, keep_prob)
        return y, tape.gradient(y, x)

    for keep_prob in (0.25, np.float32(0.9)):
        threes = np.full([COUNT], 3.0, np.float32)
        y, gradient = evaluate(mode, lambda x, keep=keep_prob: with_gradient(x, keep), threes)
        kept = y != 0
        np.testing.assert_allclose(y[kept], 3 / keep_prob, rtol=1e-6)
        np.testing.assert_allclose(gradient, np.where(kept, 1 / keep_prob, 0), rtol=1e-6)
        # Five standard deviations.
        assert abs(kept.mean() - keep_prob) < 5 * np.sqrt(keep_prob * (1 - keep_prob) / COUNT)
    x = np.ones([40, 50, 2], np.float32)
    one, other = evaluate(mode, lambda x: [operation(x, 0.5), operation(x, 0.5)], x)
    assert not np.array_equal(one, other)
    for noise_shape in ((None, 1, None), np.array([40, 1, 2])):
        (rows,) = evaluate(mode, lambda x, shape=noise_shape: operation(x, 0.5, shape, seed=4), x)
        assert (rows == rows[:, :1]).all() and set(np.unique(rows)) == {0, 2}
    (by_tensor,) = evaluate(mode, operation, x, np.float32(0.25))
    assert set(np.unique(by_tensor)) == {0, 4}
    halves = evaluate(mode, lambda x: operation(x, 0.5), x.astype(np.float16))[0]
    assert halves.dtype == np.float16 and set(np.unique(halves)) == {0, 2}


def body_refused() -> None:
    image = np.ones([1, 4, 4, 1])
    assert not wrong_refusals(
        ("RuntimeError", "tf.function", npu_ops.dropout, tf.ones([2]), 0.5),
        ("ValueError", "int32", npu_aicore_ops.dropout_v3, tf.ones([2], tf.int32), 0.5),
        *(
            ("ValueError", "above 0", npu_aicore_ops.dropout_v3, tf.ones([2]), keep)
            for keep in (0, 1.5, np.float32(0))
        ),
        ("NotImplementedError", "bilinearly", deformable_conv2d, image),
        ("NotImplementedError", "all_to_all_v", npu_cpu_ops.embeddingrankid, image),
    )
    with tf.Graph().as_default():
        x = tf.ones([2])
        assert npu_ops.dropout(x, 1.0) is x
        npu_ops.dropout(x, np.float64(1.0))


@hears
def body_float_status(said: list[str], mode: str) -> None:
    def status(first: Any, second: Any) -> Any:
        """As loss-scaling scripts have it; the flag of each pass is compared after the next has begun."""
        flag = gen_npu_ops.npu_alloc_float_status()
        with tf.control_dependencies([flag]):
            gradients = [first * 2, tf.IndexedSlices(second * 2, tf.constant([0]))]
        finite = []
        for watched in (gradients, gradients[:1]):
            with tf.control_dependencies(watched):
                after = gen_npu_ops.npu_get_float_status(flag)
                newer = gen_npu_ops.npu_get_float_status_v2()
                cleared = gen_npu_ops.npu_clear_float_status(after)
            compared = [(flag, cleared), (after, cleared), (newer, tf.zeros([8], tf.int32))]
            finite += [tf.reduce_all(tf.equal(*pair)) for pair in compared]
        return finite

    good = np.ones([3], np.float32)
    values = {"finite": 1.0, "nan": np.nan, "overflow": 3e38}
    bad = {name: np.array([[1.0, value]], np.float32) for name, value in values.items()}
    found = {name: evaluate(mode, status, good, value) for name, value in bad.items()}
    unseen = mode == "eager"  # eagerly nothing is known of the gradients, and a warning says so
    seen = [unseen] * 3 + [True] * 3
    assert found == {"finite": [True] * 6, "nan": seen, "overflow": seen}
    assert any("tf.math.is_finite" in text for text in said) == unseen
    assert not any("use its result" in text for text in said)
    with tf.Graph().as_default(), tf.control_dependencies([tf.constant(good)]):
        gen_npu_ops.npu_get_float_status(tf.zeros([8]))
    assert "use its result" in said[-1]


def body_hcom() -> Any:
    handle = npu.open()
    rank, size = handle.worker_id, handle.workers_num

    def overflows(gradient: Any) -> Any:
        status = gen_npu_ops.npu_alloc_float_status()
        with tf.control_dependencies([gradient * 2]):
            read = gen_npu_ops.npu_get_float_status(status)
        with tf.control_dependencies([read]):
            return hccl_ops.allreduce([status], "sum")[0][0]

    for mode in MODES[1:]:
        assert evaluate(mode, overflows, np.array([np.inf, 1.0])[rank]) == [1]
    own, group = tf.constant([rank + 1.0, 2.0]), {"group": "hccl_world_group"}
    results = [
        gen_npu_ops.hcom_all_reduce(input=own, reduction="sum", fusion=1, fusion_id=-1, **group),
        gen_npu_ops.hcom_all_gather(input=own, rank_size=size, **group),
        *gen_npu_ops.hcom_broadcast(
            input=[own], root_rank=size - 1, fusion=0, fusion_id=-1, **group
        ),
        gen_npu_ops.hcom_reduce_scatter(input=own, reduction="max", rank_size=size, **group),
        gen_npu_ops.hcom_reduce(input=own, reduction="sum", root_rank=0, **group),
    ]
    if rank == 0:
        gen_npu_ops.hcom_send(input=own * 5, sr_tag=3, dest_rank=1, **group)
    else:
        results.append(gen_npu_ops.hcom_receive([2], T=tf.float32, sr_tag=3, src_rank=0, **group))
    return [result.numpy().tolist() for result in results]


def test_raw_collectives(two_ranks: Pool) -> None:
    zero, one = two_ranks.run(body_hcom)
    assert zero == [[3, 4], [1, 2, 2, 2], [2, 2], [2], [3, 4]]
    assert (one[:4], one[5]) == ([*zero[:3], [2]], [5, 10])


def body_imports() -> None:
    dropout = tf.keras.layers.Dropout
    methods = dict(vars(dropout))

    from npu_bridge.estimator.npu import npu_convert_dropout  # noqa: F401
    from npu_bridge.estimator.npu_aicore_ops import npu_aicore_ops
    from npu_bridge.helper import helper
    from npu_device.npu_device import gen_npu_ops as same

    assert same is gen_npu_ops is helper.get_gen_ops() is npu_aicore_ops
    assert tf.keras.layers.Dropout is dropout and dict(vars(dropout)) == methods
    prelu = npu_vector_ops.PReLU(alpha_initializer=tf.constant_initializer(0.5))
    assert np.array(prelu(np.array([[-2.0, 3.0]], np.float32))).tolist() == [[-1.0, 3.0]]


def body_steps(mode: str) -> None:
    def adam(g: Any, v: Any, m: Any, w: Any) -> Any:
        return gen_npu_ops.adam_apply_one_assign(g, v, m, w, LR, *BETAS, EPSILON)

    def adam_decay(g: Any, v: Any, m: Any, w: Any) -> Any:
        return gen_npu_ops.adam_apply_one_with_decay_assign(g, v, m, w, LR, *BETAS, DECAY, EPSILON)

    def lamb(g: Any, v: Any, m: Any, w: Any) -> Any:
        update, v, m = gen_npu_ops.lamb_apply_optimizer_assign(
            g, v, m, w, *BETAS, EPSILON, 3, 1.0, DECAY
        )
        return (
            v,
            m,
            npu_vector_ops.lamb_apply_weight_assign(tf.norm(w), tf.norm(update), LR, update, w),
        )

    for step, weights in (
        (adam, W - LR * ADAM),
        (adam_decay, W - LR * (ADAM + DECAY * W)),
        (lamb, W - NORMS[0] / NORMS[1] * LR * LAMB),
    ):
        for found in (evaluate(mode, step, G, V, M, W), _with_variables(mode, step)):
            np.testing.assert_allclose(found, [NEW_V, NEW_M, weights])
    for norms in ((0.0, 2.0), (2.0, 0.0)):
        (found,) = evaluate(
            mode, lambda u, w, n=norms: gen_npu_ops.lamb_apply_weight_assign(*n, LR, u, w), LAMB, W
        )
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
@pytest.mark.parametrize("body", [body_dropout, body_float_status, body_steps])
def test_activations_have_their_formulas_in_each_mode(
    single: Pool, body: Callable[[str], None], mode: str
) -> None:
    single.run(body, mode)


def body_lars() -> None:
    rate = 0.02 * NORMS[0] / (np.linalg.norm(G) + 0.1 * NORMS[0] + 1e-5)
    layer = {"input_weight": W, "input_grad": G, "weight_decay": 0.1, "hyperpara": 0.02}
    for learning_rate, clipped, factor in (
        (0.5, False, rate),
        (0.5, True, rate / 0.5),
        (1e-4, True, 1.0),
    ):
        found = gen_npu_ops.lars_v2(**layer, learning_rate=learning_rate, use_clip=clipped)
        np.testing.assert_allclose(found, factor * (G + 0.1 * W))
    both = evaluate("session", lambda w, g: npu_ops.LARS([w, g], [g, w], 0.1, 0.02), W, G)
    np.testing.assert_allclose(both[0], rate * (G + 0.1 * W))
    assert len(both) == 2 and np.isfinite(both[1]).all()
    assert not wrong_refusals(
        ("ValueError", "1 weights and 0 gradients", npu_ops.LARS, [W], [], 0.1)
    )


@pytest.mark.parametrize(
    "body", [body_activations, body_layer_norm, body_lars, body_refused, body_imports]
)
def test_formulas_refusals_and_names(single: Pool, body: Callable[[], None]) -> None:
    single.run(body)
