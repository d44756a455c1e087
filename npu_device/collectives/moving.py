"""The two moves of which the operations that only move data are composed, for any dtype and any number of elements.

TensorFlow's kernels take few dtypes, and its gather crashes the process on tensors without elements (seen with
TensorFlow 2.20): what they don't take travels as 32-bit words, and at least one element is sent. Both moves are
differentiable; everything that an operation does around them is TensorFlow's own, and therefore differentiable as well.
"""

from __future__ import annotations

from typing import Any, Callable

import tensorflow as tf

from npu_device.cluster.runtime import Runtime
from npu_device.collectives import tensorflow_backend as backend
from npu_device.collectives import words
from npu_device.collectives.group import Group

Move = Callable[[tf.Tensor], tf.Tensor]


def gather(runtime: Runtime, row: tf.Tensor, group: Group) -> tf.Tensor:
    """Everybody's row on every rank: [1, n] in, [group.size, n] out; n is the same on all ranks."""

    def forward(value: tf.Tensor) -> tf.Tensor:
        return _carried(value, lambda carrier: backend.all_gather(runtime, carrier, group), group.size)

    def backward(upstream: tf.Tensor) -> tf.Tensor:
        return tf.reduce_sum(exchange(runtime, upstream, group), axis=0, keepdims=True)

    return differentiable(forward, backward, row)


def exchange(runtime: Runtime, rows: tf.Tensor, group: Group) -> tf.Tensor:
    """Row i goes to rank i, and row i of the result comes from rank i: [group.size, n] in and out; n is the same on
    all ranks.
    """

    def forward(value: tf.Tensor) -> tf.Tensor:
        return _carried(value, lambda carrier: backend.all_to_all(runtime, carrier, group), group.size)

    return differentiable(forward, lambda upstream: exchange(runtime, upstream, group), rows)


def differentiable(forward: Move, backward: Move, tensor: tf.Tensor) -> tf.Tensor:
    """``forward(tensor)``, whose gradient is ``backward(incoming gradient)``. What isn't a number of the continuous
    kind has no gradient.
    """
    if not (tensor.dtype.is_floating or tensor.dtype.is_complex):
        return forward(tensor)

    @tf.custom_gradient
    def call(value: tf.Tensor) -> tuple[tf.Tensor, Callable[[Any], Any]]:
        return forward(value), backward

    return call(tensor)


def _carried(rows: tf.Tensor, move: Move, size: int) -> tf.Tensor:
    """Rows through a move, in a dtype and a number of elements that the kernels take."""
    words.require_bits(rows.dtype)
    native = rows.dtype in backend.MOVE_DTYPES
    columns = rows.shape[1] if rows.shape[1] is not None else tf.shape(rows)[1]
    carrier = rows if native else words.to_words(rows)
    length = carrier.shape[1]
    if length:
        moved = move(carrier)
    else:
        length = tf.shape(carrier)[1]
        moved = move(tf.pad(carrier, [[0, 0], [0, tf.cast(length == 0, tf.int32)]]))[:, :length]
    result = moved if native else words.from_words(moved, rows.dtype, columns)
    result.set_shape([size, rows.shape[1]])
    return result
