"""Ascend's gradient operators against TensorFlow's differentiation, and the masks of dropout, as scripts call them: in
gradient functions of their own.
"""

from __future__ import annotations

from typing import Any, Callable

import numpy as np
import pytest
import tensorflow as tf
from collective_bodies import wrong_refusals
from op_modes import MODES, check_gradient_operator, check_gradients, evaluate
from pool import Pool
from test_ops_recurrent import ATTENTION, BATCH, BH, BI, C0, H0, HIDDEN, STEPS, WH, WI, B, W, X

import npu_device as npu
from npu_bridge.estimator import npu_aicore_ops
from npu_bridge.estimator.npu.npu_optimizer import NPUDistributedOptimizer
from npu_device import gen_npu_ops

DY, DH, DC = np.random.default_rng(7).normal(size=[3, STEPS, BATCH, HIDDEN])
ATTRIBUTES = {
    "direction": "UNIDIRECTIONAL",
    "cell_depth": 1,
    "keep_prob": 1.0,
    "cell_clip": -1.0,
    "num_proj": 0,
}
PAIRS = (
    (gen_npu_ops.drop_out_gen_mask, gen_npu_ops.drop_out_do_mask, 512),
    (gen_npu_ops.drop_out_gen_mask_v3, gen_npu_ops.drop_out_do_mask_v3, 4000),
)


def body_activations(mode: str) -> None:
    x = np.array([[-30.0, -3.0, -0.7, -0.1], [0.2, 0.9, 2.5, 40.0]])
    dy = np.arange(1.0, 9.0).reshape(2, 4)
    clipped = np.minimum(np.abs(x) / 2**0.5, 1.769) - 1.769
    parabola = x / 2 * (1 + np.sign(x) * (1 - 0.2888 * clipped**2))
    np.testing.assert_allclose(
        evaluate(mode, npu_aicore_ops.fast_gelu_v2, x)[0], parabola, atol=1e-12
    )
    for axes in (-1, (0, 1)):
        (found,) = evaluate(mode, lambda x, axes=axes: npu_aicore_ops.centralization(x, axes), x)
        np.testing.assert_allclose(found, x - x.mean(axis=axes, keepdims=True))
    for operator in (gen_npu_ops.fast_gelu_v2, gen_npu_ops.centralization):
        check_gradients(operator, x)
    slope = gen_npu_ops.fast_gelu_grad
    check_gradient_operator(mode, gen_npu_ops.fast_gelu, [dy], lambda x: slope(dy, x), x)
    assert slope(tf.ones([2], tf.float16), tf.ones([2], tf.float16)).dtype == tf.float16

    for axes in ((0, 0), (-1, -1), (1, 1)):
        gamma, beta = np.random.default_rng(1).normal(size=[2, *x.shape[axes[1] :]])

        def norm(x: Any, gamma: Any, beta: Any, axes: Any = axes) -> Any:
            return gen_npu_ops.layer_norm(x, gamma, beta, *axes, epsilon=1e-3)

        def slopes(x: Any, gamma: Any, beta: Any, norm: Any = norm) -> Any:
            _, mean, variance = norm(x, gamma, beta)
            return gen_npu_ops.fused_layer_norm_grad(dy, x, variance, mean, gamma, epsilon=1e-3)

        check_gradient_operator(
            mode, lambda *inputs, norm=norm: norm(*inputs)[0], [dy], slopes, x, gamma, beta
        )


def body_lstm_cell(mode: str) -> None:
    def slopes(x: Any, h: Any, c: Any, w: Any, b: Any) -> Any:
        """As BERT's ``npu_ops.py`` has them."""
        _, _, *gates = gen_npu_ops.basic_lstm_cell(x, h, c, w, b)
        options = {"forget_bias": 1.0, "activation": "tanh"}
        dgate, dct_1 = gen_npu_ops.basic_lstm_cell_c_state_grad(c, DH[0], DC[0], *gates, **options)
        dw, db = gen_npu_ops.basic_lstm_cell_weight_grad(x, h, dgate)
        dxt, dht = gen_npu_ops.basic_lstm_cell_input_grad(dgate, w, keep_prob=1.0)
        return dxt, dht, dct_1, dw, db

    arguments = (X[0], H0[0], C0[0], W, B)
    operator = gen_npu_ops.basic_lstm_cell
    check_gradient_operator(
        mode, lambda *inputs: operator(*inputs)[:2], (DC[0], DH[0]), slopes, *arguments
    )


def body_rnn(mode: str, seq_length: list[int] | None) -> None:
    def states(x: Any, w: Any, b: Any, h: Any, c: Any) -> Any:
        return gen_npu_ops.dynamic_rnn(x, w, b, seq_length, h, c, forget_bias=0.5)

    def slopes(x: Any, w: Any, b: Any, init_h: Any, init_c: Any) -> Any:
        y, h, c, *gates = states(x, w, b, init_h, init_c)
        given = (x, w, b, y, init_h, init_c, h, c, DY, DH, DC, *gates)
        dw, db, dx, dh, dc = gen_npu_ops.dynamic_rnn_grad(
            *given, seq_length=seq_length, **ATTRIBUTES
        )
        return dx, dw, db, dh, dc

    def slopes_of_last_state(x: Any, w: Any, b: Any, init_h: Any, init_c: Any) -> Any:
        """As BERT's ``npu_ops.py`` has them."""
        y, h, c, *gates = states(x, w, b, init_h, init_c)
        given = (x, w, b, y, init_h[-1], init_c[-1], h, c, DY, DH[-1], DC[-1], *gates)
        dw, db, dx, dh, dc = gen_npu_ops.dynamic_rnn_grad(
            *given, seq_length=seq_length, cell_type="LSTM"
        )
        return dx, dw, db, dh[tf.newaxis], dc[tf.newaxis]

    def last_state(*inputs: Any) -> Any:
        y, h, c, *_ = states(*inputs)
        return y, h[-1], c[-1]

    arguments = (X, W, B, H0, C0)
    check_gradient_operator(
        mode, lambda *inputs: states(*inputs)[:3], (DY, DH, DC), slopes, *arguments
    )
    check_gradient_operator(
        mode, last_state, (DY, DH[-1], DC[-1]), slopes_of_last_state, *arguments
    )


def body_gru(mode: str, seq_length: list[int] | None) -> None:
    def plain(x: Any, wi: Any, wh: Any, bi: Any, bh: Any, h: Any) -> Any:
        return gen_npu_ops.dynamic_gru_v2(x, wi, wh, bi, bh, seq_length, h)

    def augru(x: Any, wi: Any, wh: Any, bi: Any, bh: Any, h: Any, attention: Any) -> Any:
        return gen_npu_ops.dynamic_augru(x, wi, wh, attention, bi, bh, seq_length, h)

    def plain_slopes(x: Any, wi: Any, wh: Any, bi: Any, bh: Any, init_h: Any) -> Any:
        y, h, *gates = plain(x, wi, wh, bi, bh, init_h)
        given = (x, wi, wh, y, init_h, h, DY, DH, *gates)
        dwi, dwh, dbi, dbh, dx, dh = gen_npu_ops.dynamic_gru_v2_grad(
            *given, seq_length=seq_length, gate_order="zrh", reset_after=True, **ATTRIBUTES
        )
        return dx, dwi, dwh, dbi, dbh, dh

    def augru_slopes(
        x: Any, wi: Any, wh: Any, bi: Any, bh: Any, init_h: Any, attention: Any
    ) -> Any:
        y, h, *gates = augru(x, wi, wh, bi, bh, init_h, attention)
        given = (x, wi, wh, attention, y, init_h, h, DY, DH, *gates)
        dwi, dwh, dbi, dbh, dx, dh, da = gen_npu_ops.dynamic_augru_grad(
            *given, seq_length=seq_length
        )
        return dx, dwi, dwh, dbi, dbh, dh, da

    weights = (WI, WH, BI, BH, H0)
    check_gradient_operator(
        mode, lambda *inputs: plain(*inputs)[:2], (DY, DH), plain_slopes, X, *weights
    )
    check_gradient_operator(
        mode, lambda *inputs: augru(*inputs)[:2], (DY, DH), augru_slopes, X, *weights, ATTENTION
    )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("body", [body_activations, body_lstm_cell])
def test_gradients_of_operators_agree_with_their_formulas(
    single: Pool, body: Callable[[str], None], mode: str
) -> None:
    single.run(body, mode)


@pytest.mark.parametrize(("mode", "seq_length"), [("eager", None), ("session", [3, 1])])
@pytest.mark.parametrize("body", [body_rnn, body_gru])
def test_gradients_over_time(
    single: Pool, body: Callable[..., None], mode: str, seq_length: list[int] | None
) -> None:
    single.run(body, mode, seq_length)


def body_refusals() -> None:
    missing = "NotImplementedError: basic_lstm_cell_input_grad"
    assert not wrong_refusals(
        (
            missing,
            "npu_ops.dropout",
            gen_npu_ops.basic_lstm_cell_input_grad,
            DY[0],
            W,
            np.ones([2]),
        ),
        ("TypeError", "colour", lambda: gen_npu_ops.dynamic_rnn_grad(*[X] * 16, colour="red")),
    )


def test_operators_refuse_wrong_arguments(single: Pool) -> None:
    single.run(body_refusals)


def body_masks(mode: str) -> None:
    x = np.arange(1.0, 4001.0).reshape(40, 100)
    for make, apply, length in PAIRS:
        (mask,) = evaluate(mode, lambda make=make: make([40, 100], 0.75, 7, 9))
        if mode != "eager":  # there the same operation draws on
            (again,) = evaluate(mode, lambda make=make: make([40, 100], 0.75, 7, 9))
            np.testing.assert_array_equal(mask, again)
        assert mask.dtype == np.uint8 and mask.shape == (length,)
        kept = np.unpackbits(mask, bitorder="little") if length < 4000 else mask
        (y,) = evaluate(mode, lambda x, m, apply=apply: apply(x, m, 0.75), x, mask)
        np.testing.assert_allclose(y, np.where(kept[:4000].reshape(40, 100), x / 0.75, 0))
        assert abs((y != 0).mean() - 0.75) < 0.04
        few = 16 if length < 4000 else 6
        check_gradients(lambda x, m=mask[:few], apply=apply: apply(x, m, 0.75), x[:2, :3])
        # Scripts without a seed pass None; the probability may be a tensor.
        others = [
            evaluate(mode, lambda p, make=make: make([40, 100], p, None, None), np.float32(0.75))
            for _ in "12"
        ]
        assert not np.array_equal(*others)


@pytest.mark.parametrize("mode", MODES)
def test_masks_keep_the_wanted_part_of_the_values(single: Pool, mode: str) -> None:
    single.run(body_masks, mode)


def masked(x: Any, keep_prob: float, make: Any, apply: Any) -> Any:
    """Dropout as BERT's ``npu_ops.py`` has it: the gradient goes through the same mask."""
    mask = make(tf.shape(x), keep_prob, None, None, None)

    @tf.custom_gradient
    def dropped(x: Any) -> Any:
        return apply(x, mask, keep_prob, None), lambda upstream: apply(upstream, mask, keep_prob)

    return dropped(x)


def error(weights: Any, pair: int) -> Any:
    """How far a sum of four numbers is off when half of them are dropped; each rank has numbers of its own."""
    x = np.random.default_rng(npu.open().worker_id).normal(size=[64, 4]).astype(np.float32)
    make, apply, _ = PAIRS[pair]
    return tf.reduce_mean(
        (tf.matmul(masked(x, 0.5, make, apply), weights) - x.sum(1, keepdims=True)) ** 2
    )


def trained_in_function(pair: int) -> list[float]:
    weights = tf.Variable(tf.zeros([4, 1]))

    @tf.function
    def step() -> None:
        with tf.GradientTape() as tape:
            loss = error(weights, pair)
        (gradient,) = npu.distribute.all_reduce(tape.gradient(loss, [weights]))
        weights.assign_sub(0.1 * gradient)

    for _ in range(60):
        step()
    return weights.numpy().ravel().tolist()


def trained_in_session(pair: int) -> list[float]:
    v1 = tf.compat.v1
    with tf.Graph().as_default(), v1.Session() as session:
        weights = v1.get_variable("weights", initializer=tf.zeros([4, 1]))
        train = NPUDistributedOptimizer(v1.train.GradientDescentOptimizer(0.1)).minimize(
            error(weights, pair)
        )
        session.run(v1.global_variables_initializer())
        for _ in range(60):
            session.run(train)
        return session.run(weights).ravel().tolist()


@pytest.mark.parametrize("body", [trained_in_function, trained_in_session])
def test_training_with_masks(ranks: Pool, body: Callable[[int], list[float]]) -> None:
    for pair in range(2):
        first, *others = ranks.run(body, pair)
        assert all(weights == first for weights in others)
        # Half of the inputs, each twice as large: the best weights are below 1.
        np.testing.assert_allclose(first, 0.5, atol=0.25)
