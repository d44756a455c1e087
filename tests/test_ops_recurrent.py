"""LSTM and GRU operators against loops in numpy, and their gradients against differences."""

from __future__ import annotations

from typing import Any, Callable

import numpy as np
import pytest
import tensorflow as tf
from collective_bodies import wrong_refusals
from op_modes import check_gradients, evaluate
from pool import Pool

from npu_bridge.estimator.npu.npu_dynamic_rnn import DynamicAUGRU, DynamicGRUV2, DynamicRNN
from npu_bridge.npu_init import npu_rnn
from npu_device import gen_npu_ops

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


def body_operators(mode: str, seq_length: list[int] | None) -> None:
    lengths = seq_length or [STEPS] * BATCH

    def cell(x: Any, h: Any, c: Any, w: Any, b: Any) -> Any:
        return gen_npu_ops.basic_lstm_cell(x, h, c, w, b)

    def rnn(x: Any, w: Any, b: Any, h: Any, c: Any) -> Any:
        return gen_npu_ops.dynamic_rnn(x, w, b, seq_length, h, c, forget_bias=0.5)[:3]

    def plain(x: Any, wi: Any, wh: Any, bi: Any, bh: Any, h: Any) -> Any:
        return gen_npu_ops.dynamic_gru_v2(
            x, wi, wh, bi, bh, seq_length, h, gate_order="zrh", reset_after=True
        )[:2]

    def augru(x: Any, wi: Any, wh: Any, bi: Any, bh: Any, h: Any, attention: Any) -> Any:
        return gen_npu_ops.dynamic_augru(x, wi, wh, attention, bi, bh, seq_length, h)[:2]

    weights = (WI, WH, BI, BH, H0)
    for operation, right, *arguments in (
        (cell, lstm_step(X[0], H0[0], C0[0], 1.0), X[0], H0[0], C0[0], W, B),
        (rnn, lstm(lengths, 0.5), X, W, B, H0, C0),
        (plain, gru(lengths, np.zeros_like(ATTENTION)), X, *weights),
        (augru, gru(lengths, ATTENTION), X, *weights, ATTENTION),
    ):
        found = evaluate(mode, operation, *arguments)
        np.testing.assert_allclose(np.stack(found), np.stack(right))
        if mode == "function" and operation is not plain:
            check_gradients(operation, *arguments)


@pytest.mark.parametrize(("mode", "seq_length"), [("function", [1, 3]), ("session", None)])
def test_recurrent_operators_agree_with_their_formulas(
    single: Pool, mode: str, seq_length: list[int] | None
) -> None:
    single.run(body_operators, mode, seq_length)


def body_layers() -> None:
    """In a function the layers make weights once, and compute what the operators do; in a session they learn."""
    for layer, values, extra, right in (
        (DynamicRNN(HIDDEN, tf.float64, forget_bias=0.5), (B, W), (H0, C0), lstm([3, 2], 0.5)),
        (
            DynamicGRUV2(HIDDEN, tf.float64),
            (BH, BI, WH, WI),
            (H0,),
            gru([3, 2], np.zeros_like(ATTENTION)),
        ),
        (DynamicAUGRU(HIDDEN, tf.float64), (BH, BI, WH, WI), (H0,), gru([3, 2], ATTENTION)),
    ):
        attention = (ATTENTION,) if isinstance(layer, DynamicAUGRU) else ()
        call = tf.function(lambda layer=layer, given=(*attention, [3, 2], *extra): layer(X, *given))
        call()
        for variable, value in zip(layer.trainable_variables, values):
            limit = HIDDEN**-0.5 if len(variable.shape) > 1 else 0
            assert np.abs(variable).max() <= limit
            variable.assign(value)
        for found, expected in zip(call(), right):
            np.testing.assert_allclose(found, expected)
    given = DynamicRNN(HIDDEN, tf.float64)(X, [3, 2], H0, C0, weight=W, bias=B)
    np.testing.assert_allclose(given[0], lstm([3, 2], 0.0)[0])
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        x = tf.compat.v1.placeholder_with_default(X.astype(np.float32), [STEPS, None, INPUT])
        outputs = []
        for reuse in (False, True):
            with tf.compat.v1.variable_scope("model", reuse=reuse):
                for _ in range(2):
                    layer = DynamicRNN(hidden_size=HIDDEN, dtype=tf.float32, time_major=True)
                    outputs.append(layer(x)[0])
        assert len(tf.compat.v1.trainable_variables()) == 4 and outputs[0].shape[0] == STEPS
        loss = tf.reduce_mean(tf.square(outputs[0] - 0.3))
        train = tf.compat.v1.train.GradientDescentOptimizer(0.5).minimize(loss)
        session.run(tf.compat.v1.global_variables_initializer())
        first, second, *again = session.run(outputs)
        np.testing.assert_array_equal([first, second], again)
        assert not np.array_equal(first, second)
        before = session.run(loss)
        for _ in range(10):
            session.run(train)
        assert session.run(loss) < 0.7 * before


def body_refusals() -> None:
    missing, cell = "NotImplementedError: ", (X[0], H0[0], C0[0], W, B)
    assert not wrong_refusals(
        (
            missing + "DynamicRNN",
            "tf.reverse",
            lambda: DynamicRNN(3, tf.float32, direction="BIDIRECTIONAL"),
        ),
        (
            missing + "DynamicGRUV2",
            "update, reset, new",
            lambda: DynamicGRUV2(3, tf.float32, gate_order="rzh"),
        ),
        (
            missing + "basic",
            "npu_ops.dropout",
            lambda: gen_npu_ops.basic_lstm_cell(*cell, keep_prob=0.5),
        ),
        ("TypeError", "colour", lambda: gen_npu_ops.dynamic_rnn(X, W, B, colour="red")),
    )


def body_static_rnn() -> None:
    class Cell:
        """The simplest RNN cell: adds up."""

        output_size = state_size = INPUT

        def get_initial_state(
            self, inputs: Any = None, batch_size: Any = None, dtype: Any = None
        ) -> Any:
            return tf.zeros([batch_size or BATCH, INPUT], dtype)

        zero_state = get_initial_state

        def __call__(self, inputs: Any, state: Any, scope: Any = None) -> Any:
            return inputs + state, inputs + state

    sums = X.cumsum(axis=0)
    within = np.array([[1, 1], [1, 1], [1, 0]])[:, :, None]
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        state = tf.zeros([BATCH, INPUT], tf.float64)
        unknown_batch = tf.compat.v1.placeholder_with_default(X, [STEPS, None, INPUT])
        outputs, last = npu_rnn.npu_dynamic_rnn(
            Cell(), unknown_batch, state, sequence_length=[3, 2]
        )
        listed, last_listed = npu_rnn.npu_dynamic_rnn(Cell(), tf.unstack(X), state)
        assert isinstance(listed, list)
        found = session.run([outputs, last, tf.stack(listed), last_listed])
        unknown = tf.compat.v1.placeholder(tf.float32, [None, 2, INPUT])
        with pytest.raises(ValueError, match="axis 0"):
            npu_rnn.npu_dynamic_rnn(Cell(), unknown, dtype=tf.float32)
    right = (sums * within, [sums[2, 0], sums[1, 1]], sums, sums[-1])
    for one, expected in zip(found, right):
        np.testing.assert_allclose(one, expected)


@pytest.mark.parametrize("body", [body_layers, body_refusals, body_static_rnn])
def test_layers_refusals_and_npu_dynamic_rnn(single: Pool, body: Callable[[], None]) -> None:
    single.run(body)
