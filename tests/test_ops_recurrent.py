"""LSTM and GRU operators against loops in numpy, and their gradients against differences."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from collective_bodies import wrong_refusals
from op_modes import check_gradients, evaluate
from pool import Pool

from npu_bridge.estimator.npu.npu_dynamic_rnn import DynamicAUGRU, DynamicGRUV2, DynamicRNN
from npu_bridge.npu_init import npu_rnn
from npu_device import gen_npu_ops

MODES = ["eager", "function", "session"]
STEPS, BATCH, INPUT, HIDDEN = 3, 2, 2, 3
RANDOM = np.random.default_rng(5)
X = RANDOM.normal(size=[STEPS, BATCH, INPUT])
H0, C0 = RANDOM.normal(size=[2, 1, BATCH, HIDDEN])
W, B = RANDOM.normal(size=[INPUT + HIDDEN, 4 * HIDDEN]), RANDOM.normal(size=[4 * HIDDEN])
WI, WH = RANDOM.normal(size=[INPUT, 3 * HIDDEN]), RANDOM.normal(size=[HIDDEN, 3 * HIDDEN])
BI, BH = RANDOM.normal(size=[2, 3 * HIDDEN])
ATTENTION = RANDOM.uniform(size=[STEPS, BATCH])


def sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


def lstm_step(x: Any, h: Any, c: Any, forget_bias: float) -> list[Any]:
    i, j, f, o = np.split(np.concatenate([x, h], 1) @ W + B, 4, axis=1)
    i, j, f, o = sigmoid(i), np.tanh(j), sigmoid(f + forget_bias), sigmoid(o)
    new_c = c * f + i * j
    return [new_c, np.tanh(new_c) * o, i, j, f, o, np.tanh(new_c)]


def lstm(lengths: list[int], forget_bias: float) -> list[Any]:
    """y, h, c of each step."""
    h, c = H0[0], C0[0]
    results = []
    for step, x in enumerate(X):
        within = np.array([[step < length] for length in lengths])
        new_c, new_h, *_ = lstm_step(x, h, c, forget_bias)
        h, c = np.where(within, new_h, h), np.where(within, new_c, c)
        results.append((np.where(within, new_h, 0), h, c))
    return [np.stack(each) for each in zip(*results)]


def gru(lengths: list[int], attention: Any) -> list[Any]:
    """y, h of each step."""
    h = H0[0]
    results = []
    for step, x in enumerate(X):
        within = np.array([[step < length] for length in lengths])
        xz, xr, xn = np.split(x @ WI + BI, 3, axis=1)
        hz, hr, hn = np.split(h @ WH + BH, 3, axis=1)
        z = sigmoid(xz + hz) * (1 - attention[step][:, None])
        new_h = z * h + (1 - z) * np.tanh(xn + sigmoid(xr + hr) * hn)
        h = np.where(within, new_h, h)
        results.append((np.where(within, new_h, 0), h))
    return [np.stack(each) for each in zip(*results)]


def body_cell(mode: str) -> None:
    arguments = (X[0], H0[0], C0[0], W, B)
    results = evaluate(mode, gen_npu_ops.basic_lstm_cell, *arguments)
    for found, right in zip(results, lstm_step(X[0], H0[0], C0[0], 1.0)):
        np.testing.assert_allclose(found, right)
    if mode == "eager":
        check_gradients(lambda *inputs: gen_npu_ops.basic_lstm_cell(*inputs)[:2], *arguments, modes=[mode])


@pytest.mark.parametrize("mode", MODES)
def test_basic_lstm_cell(single: Pool, mode: str) -> None:
    single.run(body_cell, mode)


def body_rnn(mode: str, seq_length: list[int] | None) -> None:
    lengths = seq_length or [STEPS] * BATCH

    def forward(x: Any, w: Any, b: Any, h: Any, c: Any) -> Any:
        return gen_npu_ops.dynamic_rnn(x, w, b, seq_length, h, c, forget_bias=0.5)

    arguments = (X, W, B, H0, C0)
    for found, right in zip(evaluate(mode, forward, *arguments), lstm(lengths, 0.5)):
        np.testing.assert_allclose(found, right)

    if mode == "eager":
        check_gradients(lambda *inputs: forward(*inputs)[:3], *arguments, modes=[mode])


@pytest.mark.parametrize("seq_length", [None, [1, 3]])
@pytest.mark.parametrize("mode", MODES)
def test_dynamic_rnn(single: Pool, mode: str, seq_length: list[int] | None) -> None:
    single.run(body_rnn, mode, seq_length)


def body_gru(mode: str, seq_length: list[int] | None) -> None:
    lengths = seq_length or [STEPS] * BATCH

    def forward(x: Any, wi: Any, wh: Any, bi: Any, bh: Any, h: Any) -> Any:
        return gen_npu_ops.dynamic_gru_v2(x, wi, wh, bi, bh, seq_length, h, gate_order="zrh", reset_after=True)

    def forward_augru(x: Any, wi: Any, wh: Any, bi: Any, bh: Any, h: Any, attention: Any) -> Any:
        return gen_npu_ops.dynamic_augru(x, wi, wh, attention, bi, bh, seq_length, h)

    plain = (X, WI, WH, BI, BH, H0)
    for found, right in zip(evaluate(mode, forward, *plain), gru(lengths, np.zeros_like(ATTENTION))):
        np.testing.assert_allclose(found, right)
    for found, right in zip(evaluate(mode, forward_augru, *plain, ATTENTION), gru(lengths, ATTENTION)):
        np.testing.assert_allclose(found, right)
    if mode == "eager":
        check_gradients(lambda *inputs: forward(*inputs)[:2], *plain, modes=[mode])


@pytest.mark.parametrize("seq_length", [None, [3, 2]])
@pytest.mark.parametrize("mode", MODES)
def test_dynamic_gru(single: Pool, mode: str, seq_length: list[int] | None) -> None:
    single.run(body_gru, mode, seq_length)


def body_layers(mode: str) -> dict[str, Any]:
    """Each layer learns to keep its last output near a target, twice called with the same weights."""
    x = X.astype(np.float32)
    losses: dict[str, Any] = {}
    for cls, extra in ((DynamicRNN, ()), (DynamicGRUV2, ()), (DynamicAUGRU, (ATTENTION.astype(np.float32),))):

        def loss_of(layer: Any, extra: Any = extra) -> Any:
            y = layer(tf.constant(x), *extra, seq_length=tf.constant([3, 2]))[0]
            again = layer(tf.constant(x), *extra)[1]
            return tf.reduce_mean(tf.square(y[1] - 0.3)) + tf.reduce_mean(tf.square(again[-1] - 0.3))

        layer = cls(hidden_size=HIDDEN, dtype=tf.float32, time_major=True)
        if mode == "session":
            with tf.Graph().as_default(), tf.compat.v1.Session() as session:
                loss = loss_of(layer)
                variables = tf.compat.v1.trainable_variables()
                train = tf.compat.v1.train.GradientDescentOptimizer(0.5).minimize(loss)
                session.run(tf.compat.v1.global_variables_initializer())
                before = session.run(loss)
                for _ in range(10):
                    session.run(train)
                losses[cls.__name__] = (before, session.run(loss), len(variables))
            continue

        def step(layer: Any = layer, loss_of: Any = loss_of) -> Any:
            with tf.GradientTape() as tape:
                loss = loss_of(layer)
            variables = layer.trainable_variables
            for variable, gradient in zip(variables, tape.gradient(loss, variables)):
                variable.assign_sub(0.5 * gradient)
            return loss

        call = tf.function(step) if mode == "function" else step
        trained = [float(call()) for _ in range(11)]
        losses[cls.__name__] = (trained[0], trained[-1], len(layer.trainable_variables))
    return losses


@pytest.mark.parametrize("mode", MODES)
def test_layers_learn(single: Pool, mode: str) -> None:
    (found,) = single.run(body_layers, mode)
    assert {name: count for name, (_, _, count) in found.items()} == {
        "DynamicRNN": 2,
        "DynamicGRUV2": 4,
        "DynamicAUGRU": 4,
    }
    for name, (before, after, _) in found.items():
        assert after < 0.7 * before, name


def body_refusals() -> list[str]:
    missing, cell = "NotImplementedError", (X[0], H0[0], C0[0], W, B)
    return wrong_refusals(
        (missing, "direction='BIDIRECTIONAL'", lambda: DynamicRNN(3, tf.float32, direction="BIDIRECTIONAL")),
        (missing, "tf.reverse", lambda: DynamicRNN(3, tf.float32, direction="BIDIRECTIONAL")),
        (missing, "gate_order='rzh'", lambda: DynamicGRUV2(3, tf.float32, gate_order="rzh")),
        (missing, "update, reset, new", lambda: DynamicGRUV2(3, tf.float32, gate_order="rzh")),
        (missing, "keep_prob=0.5", lambda: gen_npu_ops.basic_lstm_cell(*cell, keep_prob=0.5)),
        (missing, "npu_ops.dropout", lambda: gen_npu_ops.basic_lstm_cell(*cell, keep_prob=0.5)),
        ("TypeError", "colour", lambda: gen_npu_ops.dynamic_rnn(X, W, B, colour="red")),
        ("AttributeError", "tape.gradient", lambda: gen_npu_ops.dynamic_gru_v2_grad),
    )


def test_refusals(single: Pool) -> None:
    assert single.run(body_refusals) == [[]]


def body_static_rnn() -> None:
    class Cell:
        """The simplest RNN cell: adds up."""

        output_size = state_size = INPUT

        def get_initial_state(self, inputs: Any = None, batch_size: Any = None, dtype: Any = None) -> Any:
            return tf.zeros([batch_size or BATCH, INPUT], dtype)

        zero_state = get_initial_state

        def __call__(self, inputs: Any, state: Any, scope: Any = None) -> Any:
            return inputs + state, inputs + state

    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        batch_major = tf.constant(X.transpose(1, 0, 2))
        state = tf.zeros([BATCH, INPUT], tf.float64)
        outputs, last = npu_rnn.npu_dynamic_rnn(Cell(), batch_major, state, sequence_length=[3, 2])
        listed, last_listed = npu_rnn.npu_dynamic_rnn(Cell(), tf.unstack(tf.constant(X)), state)
        assert isinstance(listed, list)
        found = session.run([outputs, last, tf.stack(listed), last_listed])
        try:
            npu_rnn.npu_dynamic_rnn(Cell(), tf.compat.v1.placeholder(tf.float32, [2, None, INPUT]), dtype=tf.float32)
            raise AssertionError("accepted")
        except ValueError as error:
            assert "axis 1" in str(error)
    sums = X.cumsum(axis=0)
    within = np.array([[1, 1, 1], [1, 1, 0]])[:, :, None]
    np.testing.assert_allclose(found[0], sums.transpose(1, 0, 2) * within)
    np.testing.assert_allclose(found[1], [sums[2, 0], sums[1, 1]])
    np.testing.assert_allclose(found[2], sums)
    np.testing.assert_allclose(found[3], sums[-1])


def test_npu_dynamic_rnn(single: Pool) -> None:
    single.run(body_static_rnn)
