"""Ascend's recurrent operators over time-major sequences: an LSTM (DynamicRNN), a GRU (DynamicGRUV2), and the same GRU
with attention (DynamicAUGRU). TensorFlow differentiates them.

Gates of the LSTM stand in the order i (input), j (new value), f (forget), o (output), as in TensorFlow's BasicLSTMCell.
Those of the GRU stand in the order z (update), r (reset), n (new value). The reset gate acts after the multiplication
by the hidden weights: ``n = tanh(x Wn + bn + r * (h Rn + cn))``, ``h' = z * h + (1 - z) * n``. With attention ``a`` the
update gate is ``(1 - a) * z`` (Zhou et al. 2019, DIEN). A step behind the end of a sequence gives 0 as output and
leaves the state as it was.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

# Attributes that support a single value: the value that works, and what to do when another one is wanted.
_FIXED: dict[str, tuple[Any, str]] = {
    "activation": ("tanh", "write the cell with the layers of tf.keras, which take any activation"),
    "cell_clip": (-1.0, "clip the output, or write the cell with the layers of tf.keras"),
    "cell_depth": (1, "stack several cells: the output of one is the input of the next"),
    "cell_type": ("LSTM", "DynamicGRUV2 is the GRU"),
    "direction": ("UNIDIRECTIONAL", "run a second cell over tf.reverse(x, [0]), and reverse its output"),
    "gate_order": ("zrh", "put the columns of weights and biases into the order update, reset, new"),
    "keep_prob": (1.0, "apply npu_ops.dropout to the input"),
    "num_proj": (0, "multiply the output by a projection matrix"),
    "reset_after": (True, "use tf.keras.layers.GRU(reset_after=False)"),
    "state_is_tuple": (True, "tf.split the state into c and h"),
    "time_major": (True, "tf.transpose(x, [1, 0, 2]) before, and the output after"),
    "use_peephole": (False, "leave the peepholes out"),
}


def check_attributes(operation: str, **attributes: Any) -> None:
    """Refuse values that aren't implemented."""
    for attribute, value in attributes.items():
        if attribute not in _FIXED:
            raise TypeError(f"{operation} got an unexpected keyword argument {attribute!r}")
        works, instead = _FIXED[attribute]
        if value is not works and value != works:
            raise NotImplementedError(
                f"{operation} was given {attribute}={value!r}; only {attribute}={works!r} is implemented.\n"
                f"What to do: {instead}."
            )


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
        forget_bias: added to the bias of the forget gate; default 1.0.
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


def dynamic_rnn(
    x: Any,
    w: Any,
    b: Any,
    seq_length: Any = None,
    init_h: Any = None,
    init_c: Any = None,
    forget_bias: float = 0.0,
    is_training: bool = True,
    name: str | None = None,
    **attributes: Any,
) -> tuple[tf.Tensor, ...]:
    """Run an LSTM over a sequence, with its gradient.

    Args:
        x: inputs, ``[time, batch, input]``, floating point.
        w: weights, ``[input + hidden, 4 * hidden]``, of the gates i (input), j (new value), f (forget), o (output).
        b: bias, ``[4 * hidden]``.
        seq_length: ``[batch]``, number of steps of each sequence; default all. Behind the end of a sequence ``y``
            is 0 and the states stay.
        init_h, init_c: ``[1, batch, hidden]`` or ``[batch, hidden]``; default 0.
        forget_bias: added to the bias of the forget gate; default 0.
        is_training: without effect, TensorFlow keeps what backward needs.
        name: of the operation.
        attributes: ``cell_type="LSTM"``, ``direction="UNIDIRECTIONAL"``, ``cell_depth=1``, ``use_peephole=False``,
            ``keep_prob=1.0``, ``cell_clip=-1.0``, ``num_proj=0``, ``time_major=True``, ``activation="tanh"``.

    Returns:
        ``y, output_h, output_c, i, j, f, o, tanhc``, each ``[time, batch, hidden]``: the outputs, the states after each
        step, the gates after their activations, and ``tanh`` of the cell states.

    Raises:
        NotImplementedError: an attribute has another value than the one given above.

    Other ranks see nothing. Source: Ascend operator DynamicRNN.
    """
    check_attributes("dynamic_rnn", **attributes)

    def cell(x_now: tf.Tensor, h: tf.Tensor, c: tf.Tensor) -> tuple[tf.Tensor, ...]:
        new_c, new_h, *gates = basic_lstm_cell(x_now, h, c, w, b, forget_bias=forget_bias)
        return new_h, new_c, *gates

    with tf.name_scope(name or "DynamicRNN"):
        x = tf.convert_to_tensor(x)
        hidden = tf.shape(w)[1] // 4
        states = [_initial_state(x, state, hidden) for state in (init_h, init_c)]
        return _over_time(cell, states, seq_length, x)


def dynamic_gru_v2(
    x: Any,
    weight_input: Any,
    weight_hidden: Any,
    bias_input: Any,
    bias_hidden: Any,
    seq_length: Any = None,
    init_h: Any = None,
    is_training: bool = True,
    name: str | None = None,
    **attributes: Any,
) -> tuple[tf.Tensor, ...]:
    """Run a GRU over a sequence, with its gradient.

    Args:
        x: inputs, ``[time, batch, input]``, floating point.
        weight_input, weight_hidden: ``[input, 3 * hidden]`` and ``[hidden, 3 * hidden]``.
        bias_input, bias_hidden: ``[3 * hidden]``.
        seq_length: ``[batch]``, number of steps of each sequence; default all. Behind a sequence's end ``y`` is 0 and
            the state stays.
        init_h: ``[1, batch, hidden]`` or ``[batch, hidden]``; default 0.
        is_training: without effect, TensorFlow keeps what backward needs.
        name: of the operation.
        attributes: ``direction="UNIDIRECTIONAL"``, ``cell_depth=1``, ``keep_prob=1.0``, ``cell_clip=-1.0``,
            ``num_proj=0``, ``time_major=True``, ``activation="tanh"``, ``gate_order="zrh"``, ``reset_after=True``.

    Returns:
        ``y, output_h, update, reset, new, hidden_new``, each ``[time, batch, hidden]``: the outputs, the states after
        each step, the gates after their activations, and ``h Rn + cn``.

    Raises:
        NotImplementedError: an attribute has another value than the one given above.

    Other ranks see nothing. Source: Ascend operator DynamicGRUV2.
    """
    check_attributes("dynamic_gru_v2", **attributes)
    with tf.name_scope(name or "DynamicGRUV2"):
        weights = (weight_input, weight_hidden, bias_input, bias_hidden)
        y, output_h, update, _, *others = _forward(tf.convert_to_tensor(x), weights, None, seq_length, init_h)
        return (y, output_h, update, *others)


def dynamic_augru(
    x: Any,
    weight_input: Any,
    weight_hidden: Any,
    weight_att: Any,
    bias_input: Any,
    bias_hidden: Any,
    seq_length: Any = None,
    init_h: Any = None,
    is_training: bool = True,
    name: str | None = None,
    **attributes: Any,
) -> tuple[tf.Tensor, ...]:
    """Run a GRU whose update gate is weakened by an attention over a sequence, with its gradient.

    Args:
        x, weight_input, weight_hidden, bias_input, bias_hidden: as in ``dynamic_gru_v2``.
        weight_att: attention, ``[time, batch]`` or ``[time, batch, 1]``.
        seq_length, init_h, is_training, name: as in ``dynamic_gru_v2``.
        **attributes: those of ``dynamic_gru_v2``.

    Returns:
        ``y, output_h, update, update_att, reset, new, hidden_new``, each ``[time, batch, hidden]``; ``update_att`` is
        the update gate times ``1 - weight_att``.

    Raises:
        NotImplementedError: an attribute has another value than the one that works.

    Other ranks see nothing. Source: Ascend operator DynamicAUGRU.
    """
    check_attributes("dynamic_augru", **attributes)
    with tf.name_scope(name or "DynamicAUGRU"):
        weights = (weight_input, weight_hidden, bias_input, bias_hidden)
        return _forward(tf.convert_to_tensor(x), weights, weight_att, seq_length, init_h)


def _forward(
    x: tf.Tensor, weights: tuple[Any, ...], weight_att: Any, seq_length: Any, init_h: Any
) -> tuple[tf.Tensor, ...]:
    weight_input, weight_hidden, bias_input, bias_hidden = weights

    def cell(x_now: tf.Tensor, attention: tf.Tensor, h: tf.Tensor) -> tuple[tf.Tensor, ...]:
        from_input = tf.split(tf.matmul(x_now, weight_input) + bias_input, 3, axis=1)
        from_hidden = tf.split(tf.matmul(h, weight_hidden) + bias_hidden, 3, axis=1)
        update = tf.sigmoid(from_input[0] + from_hidden[0])
        reset = tf.sigmoid(from_input[1] + from_hidden[1])
        new = tf.tanh(from_input[2] + reset * from_hidden[2])
        update_att = (1 - attention) * update
        return update_att * h + (1 - update_att) * new, update, update_att, reset, new, from_hidden[2]

    states = [_initial_state(x, init_h, tf.shape(weight_hidden)[0])]
    shape = [*tf.unstack(tf.shape(x)[:2]), 1]
    attention = tf.zeros(shape, x.dtype) if weight_att is None else tf.reshape(weight_att, shape)
    return _over_time(cell, states, seq_length, x, attention)


def _over_time(
    cell: Callable[..., tuple[tf.Tensor, ...]], states: list[tf.Tensor], seq_length: Any, *inputs: tf.Tensor
) -> tuple[tf.Tensor, ...]:
    """Run a cell, which returns new states and five gates, over sequences; return outputs, states and gates by step."""

    def step(previous: tuple[tf.Tensor, ...], now: tuple[tf.Tensor, ...]) -> tuple[tf.Tensor, ...]:
        within, *inputs_now = now
        before = previous[1 : len(states) + 1]
        made = cell(*inputs_now, *before)
        after = [tf.where(within, new, old) for new, old in zip(made, before)]
        return (tf.where(within, made[0], tf.zeros_like(made[0])), *after, *made[len(states) :])

    steps, batch = tf.unstack(tf.shape(inputs[0])[:2])
    lengths = tf.fill([batch], steps) if seq_length is None else seq_length
    mask = tf.transpose(tf.sequence_mask(lengths, steps))[:, :, tf.newaxis]
    zeros = tf.zeros_like(states[0])
    return tuple(tf.scan(step, (mask, *inputs), (zeros, *states, *[zeros] * 5)))


def _initial_state(x: tf.Tensor, state: Any, hidden: Any) -> tf.Tensor:
    shape = [tf.shape(x)[1], hidden]
    return tf.zeros(shape, x.dtype) if state is None else tf.reshape(state, shape)
