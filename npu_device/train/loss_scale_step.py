"""One step of a loss-scale optimizer: gradients are found finite on all ranks or not, and applied or left out.

Knows no Keras; what applying and leaving out are is said by ``keras_families``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from npu_device import _compat
from npu_device.distribute import keras_hooks
from npu_device.distribute.reduce import all_reduce


class LastStep:
    """What is known of the last step. Not a ``tf.Module``, so that the variable stays out of checkpoints.

    Attributes:
        finite: bool variable of shape [], whether the step's gradients were finite; at first False.
    """

    def __init__(self) -> None:
        self.finite = _compat.plain_variable(False, name="npu_last_step_finite")


def unscaled(gradient: Any, scale: tf.Tensor) -> Any:
    """A gradient divided by the scale; a tensor, ``tf.IndexedSlices`` or None."""
    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(unscaled(gradient.values, scale), gradient.indices, gradient.dense_shape)
    return gradient / tf.cast(scale, gradient.dtype)


def all_finite(gradients: Sequence[Any]) -> tf.Tensor:
    """Whether this rank's gradients are finite: bool, shape []; ``None`` among them counts for nothing."""
    values = [gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient for gradient in gradients]
    return tf.reduce_all([True, *(tf.reduce_all(tf.math.is_finite(value)) for value in values if value is not None)])


def on_all_ranks(finite: tf.Tensor) -> tf.Tensor:
    """Whether it is so on every rank; each has to ask."""
    return tf.cast(all_reduce(tf.cast(finite, tf.int32), "min", fusion=0), tf.bool)


def reduced_and_finite(optimizer: Any, gradients: Sequence[Any]) -> tuple[list[Any], tf.Tensor]:
    """The gradients as the step takes them, and whether they are finite, on which all ranks agree.

    Those of a wrapped inner optimizer are reduced here already, while backward still makes others; the inner one knows
    them again. Reduced gradients are the same everywhere, and need no agreement.
    """
    inner = keras_hooks.reduction_of(optimizer.inner_optimizer)
    gradients = list(gradients) if inner is None else inner.reduce_once(gradients)
    finite = all_finite(gradients)
    return gradients, finite if keras_hooks.is_wrapped(optimizer) else on_all_ranks(finite)


def apply_if_finite(
    finite: tf.Tensor,
    gradients: Sequence[Any],
    apply: Callable[[Sequence[Any]], Any],
    leave_out: Callable[[], Any],
    settle: Callable[[tf.Tensor], Any],
) -> None:
    """Apply the gradients if they are finite.

    Args:
        finite: bool, shape [].
        gradients: what ``apply`` is called with.
        apply: makes the step.
        leave_out: called instead where the gradients aren't finite.
        settle: called with ``finite`` after either.

    Raises:
        ValueError: in the cross-replica context of a ``tf.distribute`` strategy.
    """
    if not tf.distribute.has_strategy():
        tf.cond(finite, lambda: _nothing(apply(gradients)), lambda: _nothing(leave_out()))
        settle(finite)
        return

    # Under a strategy optimizers leave the replica's context to update variables, which is impossible in a branch of a
    # condition; and variables like the scale can be assigned to outside only.
    def outside(strategy: Any, finite: Any, gradients: Any) -> None:
        everywhere = tf.reduce_all(strategy.experimental_local_results(finite))
        each = strategy.extended.call_for_each_replica
        tf.cond(everywhere, lambda: _nothing(each(apply, args=(gradients,))), lambda: _nothing(leave_out()))
        settle(everywhere)

    replica = tf.distribute.get_replica_context()
    if replica is None:
        raise ValueError(
            "a loss-scale optimizer was called outside of a replica of the tf.distribute strategy.\n"
            "What to do: call apply_gradients in the function that strategy.run runs."
        )
    replica.merge_call(outside, args=(finite, gradients))


def _nothing(result: object) -> None:
    """Both branches of a condition have to return the same; what operations did has happened by then."""
    del result
