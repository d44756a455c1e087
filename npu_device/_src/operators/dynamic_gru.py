"""Ascend's DynamicGRUV2 over a whole time-major sequence, its gradient, and the same cell with attention (AUGRU).

Gates stand in the order z (update), r (reset), n (new value); the reset gate acts after the multiplication by the
hidden weights: ``n = tanh(x Wn + bn + r * (h Rn + cn))``, ``h' = z * h + (1 - z) * n``. With attention ``a`` the update
gate is ``(1 - a) * z`` (Zhou et al. 2019, DIEN).
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from npu_device._src.operators import time_steps
from npu_device._src.operators.recurrent_attributes import check_attributes


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
    del is_training
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
        weight_att: attention, ``[time, batch]`` or ``[time, batch, 1]``. All other arguments are those of
            ``dynamic_gru_v2``.

    Returns:
        ``y, output_h, update, update_att, reset, new, hidden_new``, each ``[time, batch, hidden]``; ``update_att`` is
        the update gate times ``1 - weight_att``.

    Raises:
        NotImplementedError: an attribute has another value than the one that works.

    Other ranks see nothing. Source: Ascend operator DynamicAUGRU.
    """
    del is_training
    check_attributes("dynamic_augru", **attributes)
    with tf.name_scope(name or "DynamicAUGRU"):
        weights = (weight_input, weight_hidden, bias_input, bias_hidden)
        return _forward(tf.convert_to_tensor(x), weights, weight_att, seq_length, init_h)


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
) -> tuple[tf.Tensor, ...]:
    """Return the gradients of ``dynamic_gru_v2`` from its inputs, its results and the gradients of its results.

    Args:
        x, weight_input, weight_hidden, init_h, seq_length: what ``dynamic_gru_v2`` was given.
        y: has no part in the gradient.
        h: ``output_h`` of ``dynamic_gru_v2``.
        dy: gradient of ``y``.
        dh: gradient of ``output_h``, or of its last step (``[batch, hidden]`` or ``[1, batch, hidden]``).
        update, reset, new, hidden_new: as ``dynamic_gru_v2`` gave them.
        name: of the operation.
        attributes: as in ``dynamic_gru_v2``.

    Returns:
        ``dw_input, dw_hidden, db_input, db_hidden, dx, dh_prev``, in the shapes of what they are gradients of.

    Raises:
        NotImplementedError: an attribute has another value than the one that works.

    Other ranks see nothing. Source: Ascend operator DynamicGRUV2Grad.
    """
    del y
    check_attributes("dynamic_gru_v2_grad", **attributes)

    def step(later: tuple[tf.Tensor, ...], now: tuple[tf.Tensor, ...]) -> tuple[tf.Tensor, ...]:
        within, dy_now, dh_now, h_before, update, reset, new, hidden_new = now
        dh_now += later[2]
        total = dh_now + dy_now
        d_update = total * (h_before - new) * update * (1 - update)
        d_new = total * (1 - update) * (1 - tf.square(new))
        d_reset = d_new * hidden_new * reset * (1 - reset)
        from_input = tf.concat([d_update, d_reset, d_new], axis=1)
        from_hidden = tf.concat([d_update, d_reset, d_new * reset], axis=1)
        dh_before = total * update + tf.matmul(from_hidden, weight_hidden, transpose_b=True)
        return (
            tf.where(within, from_input, tf.zeros_like(from_input)),
            tf.where(within, from_hidden, tf.zeros_like(from_hidden)),
            tf.where(within, dh_before, dh_now),
        )

    with tf.name_scope(name or "DynamicGRUV2Grad"):
        x, h = tf.convert_to_tensor(x), tf.convert_to_tensor(h)
        first_h = time_steps.initial_state(x, init_h, tf.shape(weight_hidden)[0])
        h_before = tf.concat([first_h[tf.newaxis], h[:-1]], axis=0)
        thrice = tf.tile(tf.zeros_like(first_h), [1, 3])
        from_input, from_hidden, dh_first = tf.scan(
            step,
            (
                time_steps.mask(x, seq_length),
                dy,
                time_steps.for_each_step(dh, h),
                h_before,
                *(update, reset, new, hidden_new),
            ),
            (thrice, thrice, tf.zeros_like(first_h)),
            reverse=True,
        )
        return (
            tf.tensordot(x, from_input, [[0, 1], [0, 1]]),
            tf.tensordot(h_before, from_hidden, [[0, 1], [0, 1]]),
            tf.reduce_sum(from_input, axis=[0, 1]),
            tf.reduce_sum(from_hidden, axis=[0, 1]),
            tf.tensordot(from_input, weight_input, [[2], [1]]),
            tf.reshape(dh_first[0], tf.shape(init_h)),
        )


def _attention(x: tf.Tensor, weight_att: Any) -> tf.Tensor:
    """Return the attention as ``[time, batch, 1]``; 0 for none."""
    shape = [*tf.unstack(tf.shape(x)[:2]), 1]
    return tf.zeros(shape, x.dtype) if weight_att is None else tf.reshape(weight_att, shape)


def _forward(
    x: tf.Tensor, weights: tuple[Any, ...], weight_att: Any, seq_length: Any, init_h: Any
) -> tuple[tf.Tensor, ...]:
    weight_input, weight_hidden, bias_input, bias_hidden = weights

    def step(previous: tuple[tf.Tensor, ...], inputs: tuple[tf.Tensor, ...]) -> tuple[tf.Tensor, ...]:
        x_now, within, attention = inputs
        h = previous[1]
        from_input = tf.split(tf.matmul(x_now, weight_input) + bias_input, 3, axis=1)
        from_hidden = tf.split(tf.matmul(h, weight_hidden) + bias_hidden, 3, axis=1)
        update = tf.sigmoid(from_input[0] + from_hidden[0])
        reset = tf.sigmoid(from_input[1] + from_hidden[1])
        new = tf.tanh(from_input[2] + reset * from_hidden[2])
        update_att = (1 - attention) * update
        new_h = update_att * h + (1 - update_att) * new
        return (
            tf.where(within, new_h, tf.zeros_like(h)),
            tf.where(within, new_h, h),
            update,
            update_att,
            reset,
            new,
            from_hidden[2],
        )

    h = time_steps.initial_state(x, init_h, tf.shape(weight_hidden)[0])
    elements = (x, time_steps.mask(x, seq_length), _attention(x, weight_att))
    return tuple(tf.scan(step, elements, (h, h, *[tf.zeros_like(h)] * 5)))
