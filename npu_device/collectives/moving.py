"""The two moves of which the operations that only move data are composed, for any dtype and any number of elements.

Both are differentiable; everything that an operation does around them is TensorFlow's own, and therefore
differentiable as well.
"""

from __future__ import annotations

from typing import Any, Callable

import tensorflow as tf

from npu_device.cluster.runtime import Runtime
from npu_device.collectives import backend
from npu_device.collectives.dtypes import require_bits
from npu_device.collectives.group import Group

Move = Callable[[tf.Tensor], tf.Tensor]


def gather(runtime: Runtime, row: tf.Tensor, group: Group) -> tf.Tensor:
    """Everybody's row on every rank: [1, n] in, [group.size, n] out; n is the same on all ranks."""
    require_bits(row.dtype)

    def forward(value: tf.Tensor) -> tf.Tensor:
        return backend.all_gather(runtime, value[0], group)

    def backward(upstream: tf.Tensor) -> tf.Tensor:
        return tf.reduce_sum(exchange(runtime, upstream, group), axis=0, keepdims=True)

    return differentiable(forward, backward, row)


def exchange(runtime: Runtime, rows: tf.Tensor, group: Group) -> tf.Tensor:
    """Row i goes to rank i, and row i of the result comes from rank i: [group.size, n] in and out; n is the same on
    all ranks.
    """

    require_bits(rows.dtype)

    def forward(value: tf.Tensor) -> tf.Tensor:
        return backend.all_to_all(runtime, value, group)

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
