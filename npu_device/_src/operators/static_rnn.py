"""``npu_dynamic_rnn`` of the TensorFlow 1 adapter: an RNN cell, unrolled over a sequence of known length."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


def npu_dynamic_rnn(
    cell: Any, inputs: Any, initial_state: Any = None, dtype: Any = None, sequence_length: Any = None, scope: Any = None
) -> tuple[Any, Any]:
    """Run ``tf.compat.v1.nn.static_rnn``, also on a single tensor.

    Args:
        cell: an RNN cell of TensorFlow 1.
        inputs: a list of ``[batch, …]`` tensors, one for each step; or one tensor ``[batch, time, …]`` of known time.
        initial_state: default zeros, which need ``dtype``.
        dtype: of the zeros.
        sequence_length: ``[batch]``, number of steps of each sequence; default all.
        scope: variable scope; default ``"rnn"``.

    Returns:
        The outputs, as a list or as one tensor like the inputs, and the last state.

    Raises:
        ValueError: the inputs are a tensor whose number of steps isn't known, or there is neither a state nor a dtype.

    Other ranks see nothing. Source: Ascend TF Adapter 1.15, ``npu_rnn.npu_dynamic_rnn``.
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
