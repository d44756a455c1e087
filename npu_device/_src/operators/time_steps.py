"""Time steps in the recurrent operators: masks from sequence lengths, initial states, gradients of states.

Everything is time-major. A step behind a sequence's end gives 0 as output and leaves the state as it was.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf


def mask(x: tf.Tensor, seq_length: Any) -> tf.Tensor:
    """Return bool ``[time, batch, 1]``, True within sequences; ``seq_length`` is ``[batch]``, None for all steps."""
    steps, batch = tf.shape(x)[0], tf.shape(x)[1]
    if seq_length is None:
        return tf.ones([steps, batch, 1], tf.bool)
    return tf.transpose(tf.sequence_mask(seq_length, steps))[:, :, tf.newaxis]


def initial_state(x: tf.Tensor, state: Any, hidden: Any) -> tf.Tensor:
    """Return ``[batch, hidden]`` from ``[1, batch, hidden]`` or ``[batch, hidden]``; zeros for None."""
    shape = [tf.shape(x)[1], hidden]
    return tf.zeros(shape, x.dtype) if state is None else tf.reshape(state, shape)


def for_each_step(gradient: Any, states: tf.Tensor) -> tf.Tensor:
    """Return a gradient of the states, given for all steps (``[time, batch, hidden]``) or the last (``[batch,
    hidden]``, or with a 1 in front), as one of all steps.
    """
    gradient = tf.convert_to_tensor(gradient)
    if gradient.shape.rank == 2:
        gradient = gradient[tf.newaxis]
    missing = tf.shape(states)[0] - tf.shape(gradient)[0]
    return tf.pad(gradient, [[missing, 0], [0, 0], [0, 0]])
