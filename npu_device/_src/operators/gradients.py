"""The gradients of Ascend's operators as operators of their own, for scripts that call them in gradient functions.

TensorFlow differentiates the operator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from npu_device._src.operators.activations import fast_gelu, layer_norm
from npu_device._src.operators.recurrent import (
    Tensors,
    check_attributes,
    gru_over_time,
    lstm_over_time,
    lstm_step,
)


def _differentiated(operator: Callable, sources: Sequence, *incoming: Any) -> list[tf.Tensor]:
    """Return the gradients with respect to all arguments of an operator, from those of its results."""
    # One tensor may be given as several arguments, each of which has a gradient of its own.
    copies = [tf.identity(source) for source in sources]
    # The graph differentiates itself, since a tape can't follow the loops of a TensorFlow 1 graph.
    if not tf.executing_eagerly():
        return list(tf.gradients(operator(*copies), copies, list(incoming)))
    with tf.GradientTape() as tape:
        tape.watch(copies)
        outputs = operator(*copies)
    return list(tape.gradient(outputs, copies, list(incoming)))


def fast_gelu_grad(dy: Any, x: Any, name: str | None = None) -> tf.Tensor:
    """Return the gradient of ``fast_gelu`` with respect to ``x``, times ``dy``.

    Args:
        dy: gradient of the result; shape and dtype of ``x``.
        x: the input of ``fast_gelu``.
        name: of the operation.

    Source: Ascend operator FastGeluGrad.
    """
    with tf.name_scope(name or "FastGeluGrad"):
        return _differentiated(fast_gelu, [x], tf.convert_to_tensor(dy))[0]


def layer_norm_grad(
    dy: Any,
    x: Any,
    variance: Any,
    mean: Any,
    gamma: Any,
    epsilon: float = 1e-7,
    name: str | None = None,
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Return the gradients of ``layer_norm`` with respect to ``x``, ``gamma`` and ``beta``.

    Args:
        dy: gradient of the normalised tensor; shape and dtype of ``x``.
        x, gamma, epsilon: the arguments of ``layer_norm``.
        variance, mean: the results of ``layer_norm``. The shape of ``mean`` shows which axes were averaged.
        name: of the operation.

    Source: Ascend operator LayerNormGrad.
    """
    with tf.name_scope(name or "LayerNormGrad"):
        x = tf.convert_to_tensor(x)
        gamma = tf.convert_to_tensor(gamma)
        # Averaged axes have length 1 in the mean. Where x has length 1 too, it makes no difference.
        lengths = list(tf.convert_to_tensor(mean).shape)
        axes = range(len(lengths))
        begin_norm_axis = next(axis for axis in axes if set(lengths[axis:]) == {1})
        begin_params_axis = x.shape.rank - gamma.shape.rank

        def normalised(x: tf.Tensor, gamma: tf.Tensor, beta: tf.Tensor) -> tf.Tensor:
            return layer_norm(x, gamma, beta, begin_norm_axis, begin_params_axis, epsilon)[0]

        # The gradients don't depend on the value of beta.
        beta = tf.zeros_like(gamma)
        dx, dgamma, dbeta = _differentiated(normalised, [x, gamma, beta], tf.convert_to_tensor(dy))
        return dx, dgamma, dbeta


fused_layer_norm_grad = layer_norm_grad


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
    """Return the gradients of ``basic_lstm_cell`` with respect to the gates before their activations, and to ``c``.

    Args:
        c: the cell state that ``basic_lstm_cell`` was given.
        dht, dct: gradients of ``ht`` and ``ct``, ``[batch, hidden]``.
        it, jt, ft, ot, tanhct: results of ``basic_lstm_cell``.
        forget_bias: without effect.
        activation: ``"tanh"``.
        name: of the operation.

    Returns:
        ``dgate``, ``[batch, 4 * hidden]``, and ``dct_1``, ``[batch, hidden]``.

    Raises:
        NotImplementedError: another ``activation``.

    Source: Ascend operator BasicLSTMCellCStateGrad.
    """
    check_attributes("basic_lstm_cell_c_state_grad", activation=activation)
    with tf.name_scope(name or "BasicLSTMCellCStateGrad"):
        outcomes = [it, jt, ft, ot, tanhct]

        def states(inputs: tf.Tensor, c: tf.Tensor) -> Tensors:
            return lstm_step(inputs, c, forget_bias, outcomes)[:2]

        # The gates are known, so their inputs only serve to carry the gradient.
        inputs = tf.zeros_like(tf.concat(outcomes[:4], axis=1))
        dgate, dct_1 = _differentiated(states, [inputs, c], dct, dht)
        return dgate, dct_1


def basic_lstm_cell_weight_grad(
    x: Any, h: Any, dgate: Any, name: str | None = None
) -> tuple[tf.Tensor, tf.Tensor]:
    """Return the gradients of ``basic_lstm_cell`` with respect to weights and bias.

    Args:
        x, h: the arguments of ``basic_lstm_cell``.
        dgate: from ``basic_lstm_cell_c_state_grad``.
        name: of the operation.

    Returns:
        ``dw``, ``[input + hidden, 4 * hidden]``, and ``db``, ``[4 * hidden]``.

    Source: Ascend operator BasicLSTMCellWeightGrad.
    """
    with tf.name_scope(name or "BasicLSTMCellWeightGrad"):
        inputs = tf.concat([x, h], axis=1)
        dw = tf.matmul(inputs, dgate, transpose_a=True)
        return dw, tf.reduce_sum(dgate, axis=0)


def basic_lstm_cell_input_grad(
    dgate: Any, w: Any, dropout_mask: Any = None, keep_prob: float = 1.0, name: str | None = None
) -> tuple[tf.Tensor, tf.Tensor]:
    """Return the gradients of ``basic_lstm_cell`` with respect to ``x`` and ``h``.

    Args:
        dgate: from ``basic_lstm_cell_c_state_grad``.
        w: the weights of ``basic_lstm_cell``.
        dropout_mask: None.
        keep_prob: 1.0.
        name: of the operation.

    Returns:
        ``dxt``, ``[batch, input]``, and ``dht``, ``[batch, hidden]``.

    Raises:
        NotImplementedError: a ``dropout_mask``, or another ``keep_prob``.

    Source: Ascend operator BasicLSTMCellInputGrad.
    """
    check_attributes("basic_lstm_cell_input_grad", dropout_mask=dropout_mask, keep_prob=keep_prob)
    with tf.name_scope(name or "BasicLSTMCellInputGrad"):
        gradients = tf.matmul(dgate, w, transpose_b=True)
        # The weights have a row for each element of x, and then for each of h.
        hidden = tf.shape(dgate)[1] // 4
        return gradients[:, :-hidden], gradients[:, -hidden:]


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
) -> Tensors:
    """Return the gradients of ``dynamic_rnn`` from its arguments, its results and their gradients.

    Args:
        x, w, b, init_h, init_c, seq_length: the arguments of ``dynamic_rnn``.
        y, h, c, i, j, f, o, tanhct: its results; only the gates count.
        dy: gradient of ``y``.
        dh, dc: gradients of ``output_h`` and ``output_c``, or of their last step (``[batch, hidden]`` or
            ``[1, batch, hidden]``).
        forget_bias: without effect.
        name: of the operation.
        **attributes: those of ``dynamic_rnn``.

    Returns:
        ``dw, db, dx, dh_prev, dc_prev``: gradients for ``w``, ``b``, ``x``, ``init_h`` and ``init_c``, in their shapes.

    Raises:
        NotImplementedError: an attribute has another value than the one that works.

    Source: Ascend operator DynamicRNNGrad.
    """
    check_attributes("dynamic_rnn_grad", **attributes)

    def states(*sources: tf.Tensor) -> Tensors:
        outcomes = i, j, f, o, tanhct
        return lstm_over_time(*sources, seq_length, forget_bias, *outcomes)[:3]

    with tf.name_scope(name or "DynamicRNNGrad"):
        # The states of all steps are outputs, too, so their gradients have all steps.
        incoming = [tf.convert_to_tensor(dy), _of_each_step(dh, h), _of_each_step(dc, c)]
        sources = [x, w, b, init_h, init_c]
        dx, dw, db, dh_prev, dc_prev = _differentiated(states, sources, *incoming)
        return dw, db, dx, dh_prev, dc_prev


def dynamic_gru_v2_grad(
    x: Any,
    weight_input: Any,
    weight_hidden: Any,
    y: Any,
    init_h: Any,
    h: Any,
    dy: Any,
    dh: Any,
    update: Any,
    reset: Any,
    new: Any,
    hidden_new: Any,
    seq_length: Any = None,
    name: str | None = None,
    **attributes: Any,
) -> Tensors:
    """Return the gradients of ``dynamic_gru_v2`` from its arguments, its results and their gradients.

    Args:
        x, weight_input, weight_hidden, init_h, seq_length: the arguments of ``dynamic_gru_v2``.
        y, h, update, reset, new, hidden_new: its results; only the gates count.
        dy: gradient of ``y``.
        dh: gradient of ``output_h``, or of its last step (``[batch, hidden]`` or ``[1, batch, hidden]``).
        name: of the operation.
        **attributes: those of ``dynamic_gru_v2``.

    Returns:
        ``dw_input, dw_hidden, db_input, db_hidden, dx, dh_prev``, in the shapes of what they are gradients of.

    Raises:
        NotImplementedError: an attribute has another value than the one that works.

    Source: Ascend operator DynamicGRUV2Grad.
    """
    check_attributes("dynamic_gru_v2_grad", **attributes)
    # Attention 0 stands for none; the gradient for it comes last.
    attention = tf.zeros_like(x)[..., 0]
    arguments = (x, weight_input, weight_hidden, attention)
    outcomes = (y, init_h, h, dy, dh, update, update, reset, new, hidden_new)
    name = name or "DynamicGRUV2Grad"
    gradients = dynamic_augru_grad(*arguments, *outcomes, seq_length, name)
    return gradients[:-1]


def dynamic_augru_grad(
    x: Any,
    weight_input: Any,
    weight_hidden: Any,
    weight_att: Any,
    y: Any,
    init_h: Any,
    h: Any,
    dy: Any,
    dh: Any,
    update: Any,
    update_att: Any,
    reset: Any,
    new: Any,
    hidden_new: Any,
    seq_length: Any = None,
    name: str | None = None,
    **attributes: Any,
) -> Tensors:
    """Return the gradients of ``dynamic_augru`` from its arguments, its results and their gradients.

    Args:
        x, weight_input, weight_hidden, weight_att, init_h, seq_length: the arguments of ``dynamic_augru``.
        y, h, update, update_att, reset, new, hidden_new: its results; only the gates count.
        dy, dh, name: as in ``dynamic_gru_v2_grad``.
        **attributes: those of ``dynamic_gru_v2``.

    Returns:
        ``dw_input, dw_hidden, db_input, db_hidden, dx, dh_prev, dw_att``, in the shapes of what they are gradients of.

    Raises:
        NotImplementedError: an attribute has another value than the one that works.

    Source: Ascend operator DynamicAUGRUGrad.
    """
    check_attributes("dynamic_augru_grad", **attributes)

    def states(*sources: tf.Tensor) -> Tensors:
        outcomes = update, update_att, reset, new, hidden_new
        return gru_over_time(sources[:4], *sources[4:], seq_length, *outcomes)[:2]

    with tf.name_scope(name or "DynamicAUGRUGrad"):
        # Known gates don't depend on the biases, but the biases have gradients.
        bias = tf.zeros_like(tf.convert_to_tensor(weight_hidden)[0])
        sources = [weight_input, weight_hidden, bias, bias, x, init_h, weight_att]
        incoming = [tf.convert_to_tensor(dy), _of_each_step(dh, h)]
        return tuple(_differentiated(states, sources, *incoming))


def _of_each_step(gradient: Any, states: Any) -> tf.Tensor:
    """Return a gradient of the states, of all steps or of the last, as one of all steps."""
    gradient = tf.convert_to_tensor(gradient)
    if gradient.shape.rank == 2:
        gradient = gradient[tf.newaxis]
    earlier_steps = tf.shape(states)[0] - tf.shape(gradient)[0]
    # The gradient of earlier steps is 0.
    paddings = [[earlier_steps, 0], [0, 0], [0, 0]]
    return tf.pad(gradient, paddings)
