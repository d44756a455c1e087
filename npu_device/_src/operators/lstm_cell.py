"""One step of an LSTM, Ascend's BasicLSTMCell, and its gradient in three operations.

Gates stand in the order i (input), j (new value), f (forget), o (output), as in TensorFlow's BasicLSTMCell. The step is
used by ``dynamic_rnn.py`` too.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from npu_device._src.operators.recurrent_attributes import check_attributes


def basic_lstm_cell(
    x: Any,
    h: Any,
    c: Any,
    w: Any,
    b: Any,
    keep_prob: float = 1.0,
    forget_bias: float = 1.0,
    state_is_tuple: bool = True,
    activation: str = "tanh",
    name: str | None = None,
) -> tuple[tf.Tensor, ...]:
    """Run one step of an LSTM, with its gradient.

    Args:
        x: input, ``[batch, input]``, floating point.
        h, c: hidden state and cell state, ``[batch, hidden]``.
        w: weights, ``[input + hidden, 4 * hidden]``, of the gates i, j, f, o.
        b: bias, ``[4 * hidden]``.
        keep_prob: 1.0.
        forget_bias: added to the forget gate's bias; default 1.0.
        state_is_tuple: True.
        activation: ``"tanh"``.
        name: of the operation.

    Returns:
        ``ct, ht, it, jt, ft, ot, tanhct``, each ``[batch, hidden]``: the new states, the gates after their activations,
        and ``tanh(ct)``.

    Raises:
        NotImplementedError: another ``keep_prob``, ``state_is_tuple`` or ``activation``.

    Other ranks see nothing. Source: Ascend operator BasicLSTMCell.
    """
    check_attributes("basic_lstm_cell", keep_prob=keep_prob, state_is_tuple=state_is_tuple, activation=activation)
    with tf.name_scope(name or "BasicLSTMCell"):
        gates = tf.matmul(tf.concat([x, h], axis=1), w) + b
        i, j, f, o = tf.split(gates, 4, axis=1)
        i, j, f, o = tf.sigmoid(i), tf.tanh(j), tf.sigmoid(f + forget_bias), tf.sigmoid(o)
        new_c = f * c + i * j
        tanh_c = tf.tanh(new_c)
        return new_c, o * tanh_c, i, j, f, o, tanh_c


def basic_lstm_cell_c_state_grad(
    c: Any,
    dht: Any,
    dct: Any,
    it: Any,
    jt: Any,
    ft: Any,
    ot: Any,
    tanhct: Any,
    forget_bias: float = 1.0,
    activation: str = "tanh",
    name: str | None = None,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Return the gradients of ``basic_lstm_cell`` with respect to the gates before their activations and to ``c``.

    Args:
        c: what ``basic_lstm_cell`` was given.
        dht, dct: gradients of ``ht`` and ``ct``, ``[batch, hidden]``.
        it, jt, ft, ot, tanhct: as ``basic_lstm_cell`` gave them.
        forget_bias: has no part in the gradient.
        activation: ``"tanh"``.
        name: of the operation.

    Returns:
        ``dgate``, ``[batch, 4 * hidden]``, and ``dct_1``, ``[batch, hidden]``.

    Raises:
        NotImplementedError: another ``activation``.

    Other ranks see nothing. Source: Ascend operator BasicLSTMCellCStateGrad.
    """
    del forget_bias
    check_attributes("basic_lstm_cell_c_state_grad", activation=activation)
    with tf.name_scope(name or "BasicLSTMCellCStateGrad"):
        dc = dct + dht * ot * (1 - tf.square(tanhct))
        di = dc * jt * it * (1 - it)
        dj = dc * it * (1 - tf.square(jt))
        df = dc * c * ft * (1 - ft)
        do = dht * tanhct * ot * (1 - ot)
        return tf.concat([di, dj, df, do], axis=1), dc * ft


def basic_lstm_cell_weight_grad(x: Any, h: Any, dgate: Any, name: str | None = None) -> tuple[tf.Tensor, tf.Tensor]:
    """Return the gradients of ``basic_lstm_cell`` with respect to weights and bias.

    Args:
        x, h: what ``basic_lstm_cell`` was given.
        dgate: from ``basic_lstm_cell_c_state_grad``.
        name: of the operation.

    Returns:
        ``dw``, ``[input + hidden, 4 * hidden]``, and ``db``, ``[4 * hidden]``.

    Other ranks see nothing. Source: Ascend operator BasicLSTMCellWeightGrad.
    """
    with tf.name_scope(name or "BasicLSTMCellWeightGrad"):
        return tf.matmul(tf.concat([x, h], axis=1), dgate, transpose_a=True), tf.reduce_sum(dgate, axis=0)


def basic_lstm_cell_input_grad(
    dgate: Any, w: Any, dropout_mask: Any = None, keep_prob: float = 1.0, name: str | None = None
) -> tuple[tf.Tensor, tf.Tensor]:
    """Return the gradients of ``basic_lstm_cell`` with respect to ``x`` and ``h``.

    Args:
        dgate: from ``basic_lstm_cell_c_state_grad``.
        w: what ``basic_lstm_cell`` was given.
        dropout_mask: None.
        keep_prob: 1.0.
        name: of the operation.

    Returns:
        ``dxt``, ``[batch, input]``, and ``dht``, ``[batch, hidden]``.

    Raises:
        NotImplementedError: a ``dropout_mask``, or another ``keep_prob``.

    Other ranks see nothing. Source: Ascend operator BasicLSTMCellInputGrad.
    """
    check_attributes("basic_lstm_cell_input_grad", dropout_mask=dropout_mask, keep_prob=keep_prob)
    with tf.name_scope(name or "BasicLSTMCellInputGrad"):
        both = tf.matmul(dgate, w, transpose_b=True)
        hidden = tf.shape(dgate)[1] // 4
        return both[:, :-hidden], both[:, -hidden:]
