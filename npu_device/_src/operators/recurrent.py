"""Ascend's recurrent operators over time-major sequences: an LSTM (DynamicRNN), a GRU (DynamicGRUV2), and the same GRU
with attention (DynamicAUGRU), also as layers with weights. TensorFlow differentiates them.

Gates of the LSTM stand in the order i (input), j (new value), f (forget), o (output), as in TensorFlow's BasicLSTMCell.
Those of the GRU stand in the order z (update), r (reset), n (new value). The reset gate acts after the multiplication
by the hidden weights: ``n = tanh(x Wn + bn + r * (h Rn + cn))``, ``h' = z * h + (1 - z) * n``. With attention ``a`` the
update gate is ``(1 - a) * z`` (Zhou et al. 2019, DIEN). A step behind the end of a sequence gives 0 as output and
leaves the state as it was.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

Tensors = tuple[tf.Tensor, ...]

# Attributes that support a single value: the value that works, and what to do when another one is wanted.
_FIXED: dict[str, tuple[Any, str]] = {
    "activation": ("tanh", "write the cell with the layers of tf.keras, which take any activation"),
    "cell_clip": (-1.0, "clip the output, or write the cell with the layers of tf.keras"),
    "cell_depth": (1, "stack several cells: the output of one is the input of the next"),
    "cell_type": ("LSTM", "DynamicGRUV2 is the GRU"),
    "direction": (
        "UNIDIRECTIONAL",
        "run a second cell over tf.reverse(x, [0]), and reverse its output",
    ),
    "dropout_mask": (None, "apply npu_ops.dropout to the input"),
    "gate_order": (
        "zrh",
        "put the columns of weights and biases into the order update, reset, new",
    ),
    "keep_prob": (1.0, "apply npu_ops.dropout to the input"),
    "num_proj": (0, "multiply the output by a projection matrix"),
    "reset_after": (True, "use tf.keras.layers.GRU(reset_after=False)"),
    "state_is_tuple": (True, "tf.split the state into c and h"),
    "time_major": (True, "tf.transpose(x, [1, 0, 2]) before, and the output after"),
    "use_peephole": (False, "leave the peepholes out"),
}


def check_attributes(operation: str, **attributes: Any) -> None:
    """Refuse values that aren't implemented."""
    for attribute, setting in attributes.items():
        if attribute not in _FIXED:
            raise TypeError(f"{operation} got an unexpected keyword argument {attribute!r}")
        works, instead = _FIXED[attribute]
        # Arrays and None can't be compared with ==, so identity comes first.
        if setting is not works and (works is None or setting != works):
            raise NotImplementedError(
                f"{operation} was given {attribute}={setting!r}; only {attribute}={works!r} is implemented.\n"
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
) -> Tensors:
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
    check_attributes(
        "basic_lstm_cell", keep_prob=keep_prob, state_is_tuple=state_is_tuple, activation=activation
    )
    with tf.name_scope(name or "BasicLSTMCell"):
        x_and_h = tf.concat([x, h], axis=1)
        inputs = tf.matmul(x_and_h, w) + b
        return lstm_step(inputs, c, forget_bias)


# Gradient operators are given the gates, but not all that these were computed from. They run the same steps: an
# activation then takes over its known outcome, and passes on the gradient for it.
_UNKNOWN = (None,) * 5


def lstm_step(
    inputs: tf.Tensor, c: tf.Tensor, forget_bias: float, outcomes: Sequence = _UNKNOWN
) -> Tensors:
    """Return the results of ``basic_lstm_cell`` from the inputs of its gates."""
    i_input, j_input, f_input, o_input = tf.split(inputs, 4, axis=1)
    i = _sigmoid(i_input, outcomes[0])
    j = _tanh(j_input, outcomes[1])
    f = _sigmoid(f_input + forget_bias, outcomes[2])
    o = _sigmoid(o_input, outcomes[3])
    new_c = f * c + i * j
    tanh_c = _tanh(new_c, outcomes[4])
    return new_c, o * tanh_c, i, j, f, o, tanh_c


def _sigmoid(inputs: tf.Tensor, outcome: Any) -> tf.Tensor:
    if outcome is None:
        return tf.sigmoid(inputs)
    # The value is the known outcome; the slope follows from it, since sigmoid' = s (1 - s).
    slope = outcome * (1 - outcome)
    return outcome + slope * _slope_only(inputs)


def _tanh(inputs: tf.Tensor, outcome: Any) -> tf.Tensor:
    if outcome is None:
        return tf.tanh(inputs)
    slope = 1 - tf.square(outcome)
    return outcome + slope * _slope_only(inputs)


def _slope_only(inputs: tf.Tensor) -> tf.Tensor:
    """Return zeros with the gradient of the inputs."""
    return inputs - tf.stop_gradient(inputs)


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
) -> Tensors:
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
    with tf.name_scope(name or "DynamicRNN"):
        return lstm_over_time(x, w, b, init_h, init_c, seq_length, forget_bias)


def lstm_over_time(
    x: Any,
    w: Any,
    b: Any,
    init_h: Any,
    init_c: Any,
    seq_length: Any,
    forget_bias: float,
    *outcomes: Any,
) -> Tensors:
    """Return the results of ``dynamic_rnn``."""

    def cell(x_now: tf.Tensor, *known_and_states: tf.Tensor) -> Tensors:
        *outcomes_now, h, c = known_and_states
        x_and_h = tf.concat([x_now, h], axis=1)
        inputs = tf.matmul(x_and_h, w) + b
        new_c, new_h, *gates = lstm_step(inputs, c, forget_bias, outcomes_now or _UNKNOWN)
        return new_h, new_c, *gates

    x = tf.convert_to_tensor(x)
    hidden = tf.shape(w)[1] // 4
    states = [_initial_state(x, state, hidden) for state in (init_h, init_c)]
    return _over_time(cell, states, seq_length, x, *outcomes)


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
) -> Tensors:
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
    weights = (weight_input, weight_hidden, None, bias_input, bias_hidden)
    name = name or "DynamicGRUV2"
    outcomes = dynamic_augru(x, *weights, seq_length, init_h, name=name)
    # If there is no attention, the weakened update gate is the update gate itself.
    y, output_h, update, _, *gates = outcomes
    return (y, output_h, update, *gates)


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
) -> Tensors:
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
        weights = weight_input, weight_hidden, bias_input, bias_hidden
        return gru_over_time(weights, x, init_h, weight_att, seq_length)


def gru_over_time(
    weights: Sequence, x: Any, init_h: Any, weight_att: Any, seq_length: Any, *outcomes: Any
) -> Tensors:
    """Return the results of ``dynamic_augru``; the weights are those of the input, those of the state, and biases."""
    weight_input, weight_hidden, bias_input, bias_hidden = weights

    def cell(x_now: tf.Tensor, attention: tf.Tensor, *known_and_state: tf.Tensor) -> Tensors:
        *outcomes_now, h = known_and_state
        known_update, _, known_reset, known_new, known_hidden = outcomes_now or _UNKNOWN
        from_input = tf.matmul(x_now, weight_input) + bias_input
        from_hidden = tf.matmul(h, weight_hidden) + bias_hidden
        input_update, input_reset, input_new = tf.split(from_input, 3, axis=1)
        hidden_update, hidden_reset, hidden_new = tf.split(from_hidden, 3, axis=1)
        # The gradient for the reset gate needs this product, which isn't an activation.
        if known_hidden is not None:
            hidden_new = known_hidden + _slope_only(hidden_new)
        update = _sigmoid(input_update + hidden_update, known_update)
        reset = _sigmoid(input_reset + hidden_reset, known_reset)
        new = _tanh(input_new + reset * hidden_new, known_new)
        update_att = (1 - attention) * update
        new_h = update_att * h + (1 - update_att) * new
        return new_h, update, update_att, reset, new, hidden_new

    x = tf.convert_to_tensor(x)
    steps, batch = tf.unstack(tf.shape(x)[:2])
    shape = [steps, batch, 1]
    if weight_att is None:
        attention = tf.zeros(shape, x.dtype)
    else:
        # Ascend's attention has no axis for the units.
        attention = tf.reshape(weight_att, shape)
    states = [_initial_state(x, init_h, tf.shape(weight_hidden)[0])]
    return _over_time(cell, states, seq_length, x, attention, *outcomes)


def _over_time(
    cell: Callable[..., Tensors], states: list[tf.Tensor], seq_length: Any, *inputs: tf.Tensor
) -> Tensors:
    """Run a cell, which returns new states and five gates, over sequences; return outputs, states and gates by step."""

    def step(previous: Tensors, step_inputs: Tensors) -> Tensors:
        *cell_inputs, is_running = step_inputs
        old_states = previous[1 : len(states) + 1]
        outcomes = cell(*cell_inputs, *old_states)
        # A sequence that has ended keeps its states; its outputs are 0.
        after = [tf.where(is_running, new, old) for new, old in zip(outcomes, old_states)]
        new_h = outcomes[0]
        output = tf.where(is_running, new_h, tf.zeros_like(new_h))
        gates = outcomes[len(states) :]
        return (output, *after, *gates)

    steps, batch = tf.unstack(tf.shape(inputs[0])[:2])
    lengths = seq_length
    if lengths is None:
        lengths = tf.fill([batch], steps)
    mask = tf.sequence_mask(lengths, steps)
    mask = tf.transpose(mask)[:, :, tf.newaxis]
    zeros = tf.zeros_like(states[0])
    # Output and gates of the previous step aren't used: they only have to have the shape.
    initial = (zeros, *states, *[zeros] * 5)
    # TensorFlow takes the number of steps from the first tensor: the mask's length isn't known before it runs.
    return tuple(tf.scan(step, (*inputs, mask), initial))


def _initial_state(x: tf.Tensor, state: Any, hidden: Any) -> tf.Tensor:
    shape = [tf.shape(x)[1], hidden]
    if state is None:
        return tf.zeros(shape, x.dtype)
    return tf.reshape(state, shape)


def _in_session() -> bool:
    return not tf.compat.v1.executing_eagerly_outside_functions()


class _Recurrent(tf.Module):
    def __init__(
        self, hidden_size: int, dtype: Any, is_training: bool = True, **attributes: Any
    ) -> None:
        super().__init__()
        check_attributes(type(self).__name__, **attributes)
        self._hidden_size = hidden_size
        self._dtype = tf.as_dtype(dtype)
        self._built = False

    def _prepared(self, x: Any) -> tf.Tensor:
        """Return the input as a tensor. The weights are made at the first call, when its size is known."""
        x = tf.convert_to_tensor(x, self._dtype)
        if not self._built:
            scope = contextlib.nullcontext()
            if _in_session():
                # A scope that is entered again with ``reuse`` has the layer in it again, with the same weights.
                scope = tf.compat.v1.variable_scope(None, self.name)
            with scope:
                self._build(int(x.shape[-1]))
            self._built = True
        return x

    def _build(self, input_size: int) -> None:
        raise NotImplementedError

    def _weights(self, name: str, rows: int, gates: int) -> tf.Variable:
        """Return uniformly random weights, with the limit of recurrent layers in torch and cuDNN."""
        limit = 1 / math.sqrt(self._hidden_size)
        draw = functools.partial(tf.random.uniform, minval=-limit, maxval=limit)
        return self._variable(name, [rows, gates * self._hidden_size], draw)

    def _bias(self, name: str, gates: int) -> tf.Variable:
        return self._variable(name, [gates * self._hidden_size], tf.zeros)

    def _variable(self, name: str, shape: list[int], initial: Callable) -> tf.Variable:
        if _in_session():
            return tf.compat.v1.get_variable(name, shape, self._dtype, initial)
        # A function that draws the initial values runs outside of the graph only as a callable.
        value = functools.partial(initial, shape, dtype=self._dtype)
        return tf.Variable(value, name=f"{self.name}/{name}")


class DynamicRNN(_Recurrent):
    """An LSTM over time-major sequences.

    Args:
        hidden_size: size of the state.
        dtype: of weights and inputs, floating point.
        forget_bias: added to the bias of the forget gate; default 0.
        is_training: without effect.
        attributes: as in ``dynamic_rnn``.

    Called with ``x`` (``[time, batch, input]``), ``seq_length``, ``init_h``, ``init_c``, and ``weight`` and ``bias`` to
    use instead of its own, it gives ``y, output_h, output_c, i, j, f, o, tanhc``, see ``dynamic_rnn``.

    Raises:
        NotImplementedError: an attribute has a value that isn't implemented.

    Other ranks see nothing. Source: Ascend TF Adapter 1.15, ``npu_dynamic_rnn.DynamicRNN``.
    """

    def __init__(
        self,
        hidden_size: int,
        dtype: Any,
        forget_bias: float = 0.0,
        is_training: bool = True,
        **attributes: Any,
    ) -> None:
        super().__init__(hidden_size, dtype, is_training, **attributes)
        self._forget_bias = forget_bias

    def _build(self, input_size: int) -> None:
        self._w = self._weights("w", input_size + self._hidden_size, 4)
        self._b = self._bias("b", 4)

    def __call__(
        self,
        x: Any,
        seq_length: Any = None,
        init_h: Any = None,
        init_c: Any = None,
        weight: Any = None,
        bias: Any = None,
    ) -> Tensors:
        x = self._prepared(x)
        if weight is None:
            weight = self._w
        if bias is None:
            bias = self._b
        return dynamic_rnn(
            x, weight, bias, seq_length, init_h, init_c, forget_bias=self._forget_bias
        )


class _Gru(_Recurrent):
    def _build(self, input_size: int) -> None:
        self._weight_input = self._weights("weight_input", input_size, 3)
        self._weight_hidden = self._weights("weight_hidden", self._hidden_size, 3)
        self._bias_input = self._bias("bias_input", 3)
        self._bias_hidden = self._bias("bias_hidden", 3)


class DynamicGRUV2(_Gru):
    """A GRU over time-major sequences.

    Args:
        hidden_size: size of the state.
        dtype: of weights and inputs, floating point.
        is_training: without effect.
        attributes: as in ``dynamic_gru_v2``.

    Called with ``x`` (``[time, batch, input]``), ``seq_length`` and ``init_h``, it gives
    ``y, output_h, update, reset, new, hidden_new``, see ``dynamic_gru_v2``.

    Raises:
        NotImplementedError: an attribute has a value that isn't implemented.

    Other ranks see nothing. Source: Ascend TF Adapter 1.15, ``npu_dynamic_rnn.DynamicGRUV2``.
    """

    def __call__(self, x: Any, seq_length: Any = None, init_h: Any = None) -> Tensors:
        return dynamic_gru_v2(
            self._prepared(x),
            self._weight_input,
            self._weight_hidden,
            self._bias_input,
            self._bias_hidden,
            seq_length,
            init_h,
        )


class DynamicAUGRU(_Gru):
    """A GRU with attention over time-major sequences; for arguments and errors see ``DynamicGRUV2``.

    Called with ``x`` (``[time, batch, input]``), the attention ``weight_att`` (``[time, batch]``), ``seq_length`` and
    ``init_h``, it gives ``y, output_h, update, update_att, reset, new, hidden_new``, see ``dynamic_augru``.

    Other ranks see nothing. Source: Ascend TF Adapter 1.15, ``npu_dynamic_rnn.DynamicAUGRU``.
    """

    def __call__(
        self, x: Any, weight_att: Any, seq_length: Any = None, init_h: Any = None
    ) -> Tensors:
        x = self._prepared(x)
        weights = (
            self._weight_input,
            self._weight_hidden,
            weight_att,
            self._bias_input,
            self._bias_hidden,
        )
        return dynamic_augru(x, *weights, seq_length, init_h)


def npu_dynamic_rnn(
    cell: Any,
    inputs: Any,
    initial_state: Any = None,
    dtype: Any = None,
    sequence_length: Any = None,
    scope: Any = None,
) -> tuple[Any, Any]:
    """Return the outputs, a list or one tensor like the inputs, and the last state of ``tf.compat.v1.nn.static_rnn``.

    Args:
        cell: an RNN cell of TensorFlow 1.
        inputs: a list of ``[batch, …]`` tensors, one for each step; or one tensor ``[time, batch, …]`` of known time.
        initial_state: default zeros, which need ``dtype``.
        dtype: of the zeros.
        sequence_length: ``[batch]``, number of steps of each sequence; default all.
        scope: variable scope; default ``"rnn"``.

    Raises:
        ValueError: the inputs are a tensor whose number of steps isn't known, or there is neither a state nor a dtype.

    Source: Ascend TF Adapter 1.15, ``npu_rnn.npu_dynamic_rnn``.
    """
    as_list = isinstance(inputs, (list, tuple))
    steps = inputs
    if not as_list:
        if inputs.shape[0] is None:
            raise ValueError(
                f"npu_dynamic_rnn was given inputs of shape {inputs.shape}, whose axis 0 (time) has no known length; "
                "the steps are unrolled.\nWhat to do: set_shape the inputs, or use tf.compat.v1.nn.dynamic_rnn."
            )
        steps = tf.unstack(inputs)
    outputs, state = tf.compat.v1.nn.static_rnn(
        cell,
        steps,
        initial_state=initial_state,
        dtype=dtype,
        sequence_length=sequence_length,
        scope=scope,
    )
    if not as_list:
        outputs = tf.stack(outputs)
    return outputs, state
