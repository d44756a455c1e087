"""The two moves that the operations which only move data consist of, for any dtype and any number of elements.

Both are differentiable; everything that an operation does around them is TensorFlow's own, and therefore
differentiable as well.
"""

from __future__ import annotations

from typing import Callable

import tensorflow as tf

from npu_device._src.collectives.choice import through_backend
from npu_device._src.collectives.differentiable import differentiable
from npu_device._src.collectives.group import Group
from npu_device._src.collectives.terms import Agreement


def gather(agreement: Agreement, row: tf.Tensor, group: Group) -> tf.Tensor:
    """Return all ranks' rows on every rank: [1, n] in, [group.size, n] out; n is the same on all ranks."""
    gathered = through_backend(agreement, group, row.dtype, lambda backend, now: backend.all_gather(now, row[0], group))

    def backward(upstream: tf.Tensor) -> tf.Tensor:
        return tf.reduce_sum(exchange(Agreement(agreement.job), upstream, group), axis=0, keepdims=True)

    return differentiable_move(gathered, backward, row)


def exchange(agreement: Agreement, rows: tf.Tensor, group: Group) -> tf.Tensor:
    """Send row i to rank i, and return the row from rank i as row i: [group.size, n] in and out; n is the same on
    all ranks.
    """
    received = through_backend(agreement, group, rows.dtype, lambda backend, now: backend.all_to_all(now, rows, group))
    return differentiable_move(received, lambda upstream: exchange(Agreement(agreement.job), upstream, group), rows)


def differentiable_move(moved: tf.Tensor, backward: Callable[[tf.Tensor], tf.Tensor], tensor: tf.Tensor) -> tf.Tensor:
    """Return ``moved`` with the gradient ``backward(incoming gradient)`` for ``tensor``, of which it was made. Integers
    and other discrete values have no gradient.
    """
    if not (tensor.dtype.is_floating or tensor.dtype.is_complex):
        return moved
    return differentiable([moved], lambda upstream: [backward(upstream)], [tensor])[0]
