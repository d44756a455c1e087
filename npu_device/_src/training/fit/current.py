"""The step of a replicated model that runs, or is being traced, in this thread; for calls in the step itself."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Callable

import tensorflow as tf

from npu_device._src.collectives.graph import differentiable
from npu_device._src.gradients.reduction import ReductionOptions
from npu_device._src.training.fit.share import Share

_running = threading.local()


@dataclass
class CurrentStep:
    """A step as the calls in it see it.

    Attributes:
        share: this rank's share of the step's samples.
        is_scripts: the script has written the step, not Keras.
        reduce: reduces a list of tensors over the ranks.
        gather: puts the ranks' tensors one after the other. Its gradient is the sum of all ranks' incoming gradients.
        weighing: the reductions of optimizers that have multiplied a loss by this rank's part of the samples, so that
            its gradients needn't be.
        reduced: the results of the reductions that the step has asked for itself.
    """

    share: Share
    is_scripts: bool
    reduce: Callable[[Sequence[Any], ReductionOptions], list[Any]]
    gather: Callable[[tf.Tensor], tf.Tensor]
    weighing: set[Any] = field(default_factory=set)
    reduced: list[Any] = field(default_factory=list)

    @functools.cached_property
    def weight(self) -> Any:
        """Return the share's weight; always the same object, and so one tensor."""
        return self.share.weight

    @functools.cached_property
    def counts(self) -> Any:
        """Return 1 if the rank has samples, else 0; always the same object."""
        return self.share.counts

    def loss_is_weighted(self) -> bool:
        """Return True once a loss has been weighted whose gradients have not been reduced yet."""
        return bool(self.weighing)

    # The step adds up the ranks' gradients, each times the rank's weight, if it hasn't weighted the losses. Where ranks
    # exchange values that the loss depends on, each rank's loss counts by its weight, too; and what comes of that for
    # this rank's samples must not be weighted once more.

    def to_exchange(self, tensor: tf.Tensor) -> tf.Tensor:
        """Return a tensor that is going to be added up or gathered, with the gradient that this calls for."""

        def backward(upstream: tf.Tensor) -> list[tf.Tensor]:
            if self.loss_is_weighted():
                return [upstream]
            return [tf.math.divide_no_nan(upstream, tf.cast(self.weight, upstream.dtype))]

        return _with_gradient(tensor, backward)

    def exchanged(self, tensor: tf.Tensor) -> tf.Tensor:
        """Return a tensor that has been added up or gathered, with the gradient that this calls for."""

        def backward(upstream: tf.Tensor) -> list[tf.Tensor]:
            return [upstream if self.loss_is_weighted() else upstream * tf.cast(self.weight, upstream.dtype)]

        return _with_gradient(tensor, backward)


def _with_gradient(tensor: Any, backward: Callable[[tf.Tensor], list[tf.Tensor]]) -> Any:
    if not tf.is_tensor(tensor) or isinstance(tensor, tf.IndexedSlices) or not tensor.dtype.is_floating:
        return tensor
    return differentiable([tf.identity(tensor)], backward, [tensor])[0]


def current_step() -> CurrentStep | None:
    """Return the step that runs in this thread; None outside one."""
    return getattr(_running, "step", None)


@contextlib.contextmanager
def running(step: CurrentStep | None) -> Iterator[None]:
    """Let calls in the block see a step."""
    before = current_step()
    _running.step = step
    try:
        yield
    finally:
        _running.step = before
