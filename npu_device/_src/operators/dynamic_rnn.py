"""Ascend's DynamicRNN: an LSTM over a whole time-major sequence, and its gradient as an operation of its own."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from npu_device._src.operators import time_steps
from npu_device._src.operators.lstm_cell import basic_lstm_cell
from npu_device._src.operators.recurrent_attributes import check_attributes


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
        seq_length: ``[batch]``, number of steps of each sequence; default all. Behind a sequence's end ``y`` is 0 and
            the states stay.
        init_h, init_c: ``[1, batch, hidden]`` or ``[batch, hidden]``; default 0.
        forget_bias: added to the forget gate's bias; default 0.
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
    del is_training
    check_attributes("dynamic_rnn", **attributes)

    def step(previous: tuple[tf.Tensor, ...], inputs: tuple[tf.Tensor, tf.Tensor]) -> tuple[tf.Tensor, ...]:
        x_now, within = inputs
        h, c = previous[1:3]
        new_c, new_h, *gates = basic_lstm_cell(x_now, h, c, w, b, forget_bias=forget_bias)
        return (
            tf.where(within, new_h, tf.zeros_like(new_h)),
            tf.where(within, new_h, h),
            tf.where(within, new_c, c),
            *gates,
        )

    with tf.name_scope(name or "DynamicRNN"):
        x = tf.convert_to_tensor(x)
        hidden = tf.shape(w)[1] // 4
        h = time_steps.initial_state(x, init_h, hidden)
        c = time_steps.initial_state(x, init_c, hidden)
        zeros = tf.zeros_like(h)
        results = tf.scan(step, (x, time_steps.mask(x, seq_length)), (zeros, h, c, *[zeros] * 5))
        return tuple(results)


def dynamic_rnn_grad(
    x: Any,
    w: Any,
    b: Any,
    y: Any,
    init_h: Any,
    init_c: Any,
    h: Any,
    c: Any,
    dy: Any,
    dh: Any,
    dc: Any,
    i: Any,
    j: Any,
    f: Any,
    o: Any,
    tanhct: Any,
    seq_length: Any = None,
    forget_bias: float = 0.0,
    name: str | None = None,
    **attributes: Any,
) -> tuple[tf.Tensor, ...]:
    """Return the gradients of ``dynamic_rnn`` from its inputs and the gradients of its results.

    Args:
        x, w, b, init_h, init_c, seq_length, forget_bias: what ``dynamic_rnn`` was given.
        h: ``output_h`` of ``dynamic_rnn``; only its number of steps counts.
        dy: gradient of ``y``.
        dh, dc: gradients of ``output_h`` and ``output_c``, or of their last steps (``[batch, hidden]`` or ``[1, batch,
            hidden]``).
        y, c, i, j, f, o, tanhct: results of ``dynamic_rnn``, which are computed again here.
        name: of the operation.
        attributes: as in ``dynamic_rnn``.

    Returns:
        ``dw, db, dx, dh_prev, dc_prev``: gradients for ``w``, ``b``, ``x``, ``init_h`` and ``init_c``, in their shapes.

    Raises:
        NotImplementedError: an attribute has a value other than the one that works.

    Other ranks see nothing. Source: Ascend operator DynamicRNNGrad.
    """
    del y, c, i, j, f, o, tanhct
    with tf.name_scope(name or "DynamicRNNGrad"):
        inputs = [tf.convert_to_tensor(value) for value in (w, b, x, init_h, init_c)]
        from_results = [dy, time_steps.for_each_step(dh, h), time_steps.for_each_step(dc, h)]

        def results(w: Any, b: Any, x: Any, init_h: Any, init_c: Any) -> tuple[tf.Tensor, ...]:
            return dynamic_rnn(x, w, b, seq_length, init_h, init_c, forget_bias, **attributes)[:3]

        if not tf.executing_eagerly():  # a tape can't follow the loops of TensorFlow 1's graphs
            return tuple(tf.gradients(results(*inputs), inputs, from_results))
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            made = results(*inputs)
        return tuple(tape.gradient(made, inputs, from_results))
