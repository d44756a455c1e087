"""What a rank does with the gradients of a Keras optimizer before they are reduced: add up those of several batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from npu_device._src import compat

_as_it_is = tf.autograph.experimental.do_not_convert


def made_dense(gradients: Sequence[Any]) -> list[Any]:
    """Return gradients with sparse ones made dense."""
    return [tf.convert_to_tensor(one) if isinstance(one, tf.IndexedSlices) else one for one in gradients]


class LocalGradients:
    """What happens to the gradients of a Keras optimizer on this rank.

    With ``passes``, those of so many batches are added up, and their sum, or mean, is reduced and applied.
    """

    def __init__(self, dense: bool, passes: int, averages: bool) -> None:
        self._dense, self._passes, self._averages = dense, passes, averages
        self._sums: list[Any] | None = None
        self._count: Any = None
        self._is_inside = False

    def install(self, optimizer: Any) -> None:
        """Put this before the methods of the optimizer."""
        apply_pairs: Any = optimizer.apply_gradients
        apply_lists: Any = getattr(optimizer, "apply", None)

        @_as_it_is
        def apply_gradients(grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
            gradients, variables = map(list, zip(*grads_and_vars))
            go_on = lambda mine: apply_pairs(list(zip(mine, variables)), *args, **kwargs)  # noqa: E731
            return self.enter(optimizer, gradients, variables, go_on)

        @_as_it_is
        def apply(grads: Any, trainable_variables: Any = None) -> Any:
            variables = compat.variables_to_update(optimizer, trainable_variables)
            return self.enter(optimizer, list(grads), variables, lambda mine: apply_lists(mine, trainable_variables))

        optimizer.apply_gradients = apply_gradients
        if apply_lists is not None:
            optimizer.apply = apply

    def enter(self, optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any], apply: Any) -> Any:
        """Apply gradients, or only add them up if it isn't time yet."""
        if self._is_inside:
            return apply(gradients)
        self._is_inside = True
        try:
            gradients = made_dense(gradients) if self._dense else list(gradients)
            if self._passes == 1:
                return apply(gradients)
            return self._add_up(optimizer, gradients, variables, apply)
        finally:
            self._is_inside = False

    def _add_up(self, optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any], apply: Any) -> Any:
        if any(isinstance(one, tf.IndexedSlices) for one in gradients):
            raise ValueError("backward_passes_per_step above 1 needs sparse_as_dense=True for sparse gradients")
        with tf.init_scope():
            compat.build_optimizer(optimizer, variables)
            if self._sums is None:
                self._count = tf.Variable(0, trainable=False)
                self._sums = [
                    None if one is None else tf.Variable(tf.zeros(variable.shape, one.dtype), trainable=False)
                    for one, variable in zip(gradients, variables)
                ]
        sums, passes = self._sums, self._passes
        for total, one in zip(sums, gradients):
            if total is not None:
                total.assign_add(one)

        def last() -> tf.Tensor:
            scale = passes if self._averages else 1
            apply([None if total is None else total.read_value() / scale for total in sums])
            for total in sums:
                if total is not None:
                    total.assign(tf.zeros_like(total))
            return tf.constant(True)

        def other() -> tf.Tensor:
            optimizer.iterations.assign_add(1)
            return tf.constant(False)

        return tf.cond(self._count.assign_add(1) % passes == 0, last, other)
