"""Ranks that exist only in a trace: what they exchange while the first-step check runs a step on parts of a batch.

A step is traced once, as one rank. It runs for one part after the other, so that none of them knows what the others
send. So it runs several times: each time the exchanges have the results of what was sent the last time, until they no
longer change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from npu_device._src import compat
from npu_device._src.collectives.graph import differentiable
from npu_device._src.gradients.reduction import ReductionOptions


class NotChecked(Exception):
    """The check can't run the step; the text says why."""


@dataclass
class _Exchange:
    sent: tf.Tensor
    joins: bool
    result: Any
    is_known: Any


class VirtualRanks:
    """Stands in for a ``World`` in a trace; ``is_first`` is a tensor, True for the part with the first samples."""

    rank, size, is_main = 0, 2, True

    def __init__(self, graph: Any, is_first: tf.Tensor) -> None:
        self.graph = graph
        self.is_first = is_first
        self._exchanges: list[_Exchange] = []

    def add_up(self, tensor: tf.Tensor) -> tf.Tensor:
        """Return the sum of the parts' tensors, with a gradient as ``World.add_up``."""
        total = self._exchange(tensor, joins=False)
        if not tensor.dtype.is_floating:
            return total
        return differentiable([total], lambda upstream: [self.add_up(upstream)], [tensor])[0]

    def gather(self, tensor: tf.Tensor, purpose: str = "") -> tf.Tensor:
        """Return the parts' tensors one after the other, with a gradient as ``World.gather``."""
        del purpose
        everything = self._exchange(tensor, joins=True)
        if not tensor.dtype.is_floating:
            return everything

        def backward(upstream: tf.Tensor) -> list[tf.Tensor]:
            rows = tf.shape(tensor)[0]
            begin = tf.where(self.is_first, 0, tf.shape(everything)[0] - rows)
            return [self.add_up(upstream)[begin : begin + rows]]

        return differentiable([everything], backward, [tensor])[0]

    def reduce(self, tensors: Sequence[Any], options: ReductionOptions) -> list[Any]:
        """Return the sums of the parts' tensors; ``None`` stays, and rows become dense."""
        if options.kind != "sum":
            raise NotChecked(f"the step reduces by {options.kind!r} itself")
        return [None if each is None else self.add_up(tf.convert_to_tensor(each)) for each in tensors]

    def _exchange(self, tensor: tf.Tensor, joins: bool) -> tf.Tensor:
        tensor = tf.convert_to_tensor(tensor)
        if not compat.is_in(self.graph, tensor):
            raise NotChecked("the ranks exchange values in a branch or a loop of the step")
        with tf.init_scope():
            result = compat.plain_variable(np.zeros([0], tensor.dtype.as_numpy_dtype), shape=tf.TensorShape(None))
            is_known = compat.plain_variable(False)
        self._exchanges.append(_Exchange(tensor, joins, result, is_known))
        value = tf.cond(tf.identity(is_known), lambda: tf.identity(result), lambda: tf.identity(tensor))
        value.set_shape([None, *tensor.shape[1:]] if joins else tensor.shape)
        return tf.stop_gradient(value)

    @property
    def sent(self) -> list[tf.Tensor]:
        """Return what the step has sent, to be returned by the traced function."""
        return [exchange.sent for exchange in self._exchanges]

    def forget(self) -> None:
        """Let each part get what it has sent itself, as if it were alone."""
        for exchange in self._exchanges:
            exchange.is_known.assign(False)

    def deliver(self, sent: Sequence[Sequence[Any]]) -> bool:
        """Set the exchanges' results to those of what all parts have sent; return True if nothing has changed."""
        settled = True
        for place, exchange in enumerate(self._exchanges):
            parts = [np.asarray(part[place]) for part in sent]
            if not exchange.joins and len({part.shape for part in parts}) > 1:
                settled = False  # for lack of what they exchange before
                continue
            value = np.concatenate(parts) if exchange.joins else sum(parts[1:], parts[0])
            if not (bool(exchange.is_known) and np.array_equal(exchange.result.numpy(), value)):
                settled = False
                exchange.result.assign(value)
                exchange.is_known.assign(True)
        return settled
