"""One step of a loss-scale optimizer: all ranks agree whether gradients are finite, and apply or skip them.

``keras_families`` defines how a step is applied or skipped, which depends on the Keras.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from npu_device._src import compat
from npu_device._src.gradients.sparse import with_values
from npu_device._src.training.applied_gradients import is_wrapped, reduction_of
from npu_device._src.training.reduce_values import all_reduce


class LastStep:
    """Whether the gradients of the last step were finite, in a variable; at first False.

    Not a ``tf.Module``, so that the variable stays out of checkpoints.
    """

    def __init__(self) -> None:
        self.finite = compat.plain_variable(False, name="npu_last_step_finite")


def unscaled(gradient: Any, scale: tf.Tensor) -> Any:
    """Return a gradient divided by the scale; a tensor, ``tf.IndexedSlices`` or None."""
    return with_values(gradient, lambda values: values / tf.cast(scale, values.dtype))


def all_finite(gradients: Sequence[Any]) -> tf.Tensor:
    """Return whether the gradients of this rank are finite: bool, shape []; ``None`` among them is ignored."""
    values = [gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient for gradient in gradients]
    return tf.reduce_all([True, *(tf.reduce_all(tf.math.is_finite(value)) for value in values if value is not None)])


def on_all_ranks(finite: tf.Tensor) -> tf.Tensor:
    """Return whether it is so on every rank; each has to call this."""
    return tf.cast(all_reduce(tf.cast(finite, tf.int32), "min", fusion=0), tf.bool)


def reduced_and_finite(optimizer: Any, gradients: Sequence[Any]) -> tuple[list[Any], tf.Tensor]:
    """Return the gradients as the step takes them, and whether they are finite; all ranks agree on that.

    Those of a wrapped inner optimizer are already reduced here, while backward still produces others; the inner one
    recognises them. Reduced gradients are the same everywhere, so no agreement is needed.
    """
    inner = reduction_of(optimizer.inner_optimizer)
    gradients = list(gradients) if inner is None else inner.reduce_once(gradients)
    finite = all_finite(gradients)
    return gradients, finite if is_wrapped(optimizer) else on_all_ranks(finite)


def apply_if_finite(
    finite: tf.Tensor,
    gradients: Sequence[Any],
    apply: Callable[[Sequence[Any]], Any],
    leave_out: Callable[[], Any],
    settle: Callable[[tf.Tensor], Any],
) -> None:
    """Apply the gradients if they are finite, else call ``leave_out``; then call ``settle(finite)``.

    Raises:
        ValueError: in the cross-replica context of a ``tf.distribute`` strategy.
    """
    if not tf.distribute.has_strategy():
        tf.cond(finite, lambda: _nothing(apply(gradients)), lambda: _nothing(leave_out()))
        settle(finite)
        return

    # Under a strategy, optimizers leave the replica context to update variables, which is impossible in a branch of a
    # condition; and variables like the scale can only be assigned outside it.
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
    """Return None: both branches of a condition must return the same, and their operations have run by then."""
    del result
