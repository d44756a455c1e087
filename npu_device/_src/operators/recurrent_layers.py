"""``DynamicRNN``, ``DynamicGRUV2``, ``DynamicAUGRU``: recurrent operators with weights, made at the first call; and
``npu_dynamic_rnn``, which unrolls a cell of TensorFlow's.
"""

from __future__ import annotations

import math
from typing import Any

import tensorflow as tf

from npu_device._src.operators.recurrent import check_attributes, dynamic_augru, dynamic_gru_v2, dynamic_rnn


class _Recurrent(tf.Module):
    def __init__(self, hidden_size: int, dtype: Any, is_training: bool = True, **attributes: Any) -> None:
        super().__init__()
        check_attributes(type(self).__name__, **attributes)
        self._hidden_size = hidden_size
        self._dtype = tf.as_dtype(dtype)
        self._built = False

    def __call__(self, x: Any, *arguments: Any, **keywords: Any) -> tuple[tf.Tensor, ...]:
        x = tf.convert_to_tensor(x, self._dtype)
        if not self._built:
            self._build(int(x.shape[-1]))
            self._built = True
        return self._call(x, *arguments, **keywords)

    def _build(self, input_size: int) -> None:
        raise NotImplementedError

    def _call(self, x: tf.Tensor, *arguments: Any, **keywords: Any) -> tuple[tf.Tensor, ...]:
        raise NotImplementedError

    def _weights(self, name: str, rows: int, gates: int) -> tf.Variable:
        """Return uniformly random weights, with the limit of recurrent layers in torch and cuDNN."""
        limit = 1 / math.sqrt(self._hidden_size)
        # In a function that draws the initial values, only a callable is run outside of it.
        shape = [rows, gates * self._hidden_size]
        return tf.Variable(lambda: tf.random.uniform(shape, -limit, limit, self._dtype), name=f"{self.name}/{name}")

    def _bias(self, name: str, gates: int) -> tf.Variable:
        return tf.Variable(lambda: tf.zeros([gates * self._hidden_size], self._dtype), name=f"{self.name}/{name}")


class DynamicRNN(_Recurrent):
    """An LSTM over time-major sequences.

    Args:
        hidden_size: size of the state.
        dtype: of weights and inputs, floating point.
        forget_bias: added to the bias of the forget gate; default 0.
        is_training: without effect.
        attributes: as in ``dynamic_rnn``.

    Called with ``x`` (``[time, batch, input]``), ``seq_length``, ``init_h`` and ``init_c``, it gives
    ``y, output_h, output_c, i, j, f, o, tanhc``, see ``dynamic_rnn``.

    Raises:
        NotImplementedError: an attribute has a value that isn't implemented.

    Other ranks see nothing. Source: Ascend TF Adapter 1.15, ``npu_dynamic_rnn.DynamicRNN``.
    """

    def __init__(
        self, hidden_size: int, dtype: Any, forget_bias: float = 0.0, is_training: bool = True, **attributes: Any
    ) -> None:
        super().__init__(hidden_size, dtype, is_training, **attributes)
        self._forget_bias = forget_bias

    def _build(self, input_size: int) -> None:
        self._w = self._weights("w", input_size + self._hidden_size, 4)
        self._b = self._bias("b", 4)

    def _call(
        self, x: tf.Tensor, seq_length: Any = None, init_h: Any = None, init_c: Any = None
    ) -> tuple[tf.Tensor, ...]:
        return dynamic_rnn(x, self._w, self._b, seq_length, init_h, init_c, forget_bias=self._forget_bias)


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

    def _call(self, x: tf.Tensor, seq_length: Any = None, init_h: Any = None) -> tuple[tf.Tensor, ...]:
        return dynamic_gru_v2(
            x, self._weight_input, self._weight_hidden, self._bias_input, self._bias_hidden, seq_length, init_h
        )


class DynamicAUGRU(_Gru):
    """A GRU with attention over time-major sequences; for arguments and errors see ``DynamicGRUV2``.

    Called with ``x`` (``[time, batch, input]``), the attention ``weight_att`` (``[time, batch]``), ``seq_length`` and
    ``init_h``, it gives ``y, output_h, update, update_att, reset, new, hidden_new``, see ``dynamic_augru``.

    Other ranks see nothing. Source: Ascend TF Adapter 1.15, ``npu_dynamic_rnn.DynamicAUGRU``.
    """

    def _call(self, x: tf.Tensor, weight_att: Any, seq_length: Any = None, init_h: Any = None) -> tuple[tf.Tensor, ...]:
        weights = self._weight_input, self._weight_hidden, weight_att, self._bias_input, self._bias_hidden
        return dynamic_augru(x, *weights, seq_length, init_h)


def npu_dynamic_rnn(
    cell: Any, inputs: Any, initial_state: Any = None, dtype: Any = None, sequence_length: Any = None, scope: Any = None
) -> tuple[Any, Any]:
    """Return the outputs, a list or one tensor like the inputs, and the last state of ``tf.compat.v1.nn.static_rnn``.

    Args:
        cell: an RNN cell of TensorFlow 1.
        inputs: a list of ``[batch, …]`` tensors, one for each step; or one tensor ``[batch, time, …]`` of known time.
        initial_state: default zeros, which need ``dtype``.
        dtype: of the zeros.
        sequence_length: ``[batch]``, number of steps of each sequence; default all.
        scope: variable scope; default ``"rnn"``.

    Raises:
        ValueError: the inputs are a tensor whose number of steps isn't known, or there is neither a state nor a dtype.

    Source: Ascend TF Adapter 1.15, ``npu_rnn.npu_dynamic_rnn``.
    """
    as_list = isinstance(inputs, (list, tuple))
    if not as_list and inputs.shape[1] is None:
        raise ValueError(
            f"npu_dynamic_rnn was given inputs of shape {inputs.shape}, whose axis 1 (time) has no known length; the "
            "steps are unrolled.\nWhat to do: set_shape the inputs, or use tf.compat.v1.nn.dynamic_rnn."
        )
    steps = list(inputs) if as_list else tf.unstack(inputs, axis=1)
    outputs, state = tf.compat.v1.nn.static_rnn(
        cell, steps, initial_state=initial_state, dtype=dtype, sequence_length=sequence_length, scope=scope
    )
    return (outputs if as_list else tf.stack(outputs, axis=1)), state
