"""Gradients that a rank keeps until they are reduced: those of several batches."""

from __future__ import annotations

from collections.abc import Sequence
from types import MethodType
from typing import Any

import tensorflow as tf

from npu_device._src import compat
from npu_device._src.training.watching.partial_sums import methods_that_warn, note_partial_sums
from npu_device._src.training.watching.wrapped_optimizers import reducer_of, reducing_optimizer

_as_it_is = compat.do_not_convert


def _dense(gradient: Any) -> Any:
    if isinstance(gradient, tf.IndexedSlices):
        return tf.convert_to_tensor(gradient)
    return gradient


class LocalGradients:
    """What happens to the gradients of a Keras optimizer on this rank.

    Args:
        sparse_as_dense: sparse ones are made dense.
        backward_passes_per_step: those of so many batches are added up, and their sum is reduced and applied.
        average_aggregated_gradients: their mean instead.
    """

    def __init__(
        self,
        sparse_as_dense: bool = False,
        backward_passes_per_step: int = 1,
        average_aggregated_gradients: bool = False,
    ) -> None:
        self._makes_dense = sparse_as_dense
        self.passes = backward_passes_per_step
        self._divisor = 1
        if average_aggregated_gradients:
            self._divisor = backward_passes_per_step
        self._sums: dict[int, Any] = {}  # sums by the id of the trained variable
        self._count: Any = None
        self._is_applying = False

    def made_dense(self, gradients: Sequence) -> list:
        """Return gradients, with sparse ones made dense if that is asked for."""
        if not self._makes_dense:
            return list(gradients)
        return list(map(_dense, gradients))

    def install(self, optimizer: Any) -> None:
        """Put this before the methods of the optimizer, if anything is asked for."""
        if not self._makes_dense and self.passes == 1:
            return
        if self.passes > 1:
            self._keep_sums(optimizer)
        # The optimizer's own methods, which are replaced below.
        own_apply_gradients: Any = optimizer.apply_gradients
        own_apply: Any = getattr(optimizer, "apply", None)

        @_as_it_is
        def apply_gradients(grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
            gradients, variables = map(list, zip(*grads_and_vars))

            def apply_own(to_apply: Sequence) -> Any:
                return own_apply_gradients(list(zip(to_apply, variables)), *args, **kwargs)

            return self.enter(optimizer, gradients, variables, apply_own)

        @_as_it_is
        def apply(grads: Any, trainable_variables: Any = None) -> Any:
            variables = compat.variables_to_update(optimizer, trainable_variables)

            def apply_own(to_apply: Sequence) -> Any:
                return own_apply(to_apply, trainable_variables)

            return self.enter(optimizer, list(grads), variables, apply_own)

        optimizer.apply_gradients = apply_gradients
        if own_apply is not None:
            optimizer.apply = apply

    def _keep_sums(self, optimizer: Any) -> None:
        """Let checkpoints keep what this rank has added up, and other files cause a warning."""
        own_build: Any = getattr(optimizer, "build", None)

        def build_with_sums(variables: Any) -> None:
            own_build(variables)
            self._make_sums(optimizer, variables)

        # Legacy optimizers of tf-keras have no ``build``, nor a method for files of Keras.
        if own_build is not None:
            optimizer.build = build_with_sums
        for name, method in methods_that_warn(lambda _: self._sums.values()).items():
            if hasattr(optimizer, name):
                setattr(optimizer, name, MethodType(method, optimizer))

    def enter(self, optimizer: Any, gradients: Sequence, variables: Sequence, apply: Any) -> Any:
        """Apply gradients, or only add them up if it isn't time yet."""
        # ``apply_gradients`` of Keras calls ``apply``.
        if self._is_applying:
            return apply(gradients)
        self._is_applying = True
        try:
            gradients = self.made_dense(gradients)
            if self.passes == 1:
                return apply(gradients)
            return self._accumulate(optimizer, gradients, variables, apply)
        finally:
            self._is_applying = False

    def _accumulate(
        self, optimizer: Any, gradients: Sequence, variables: Sequence, apply: Any
    ) -> Any:
        if any(isinstance(gradient, tf.IndexedSlices) for gradient in gradients):
            raise ValueError(
                "backward_passes_per_step above 1 needs sparse_as_dense=True for sparse gradients"
            )
        # Variables can't be made within the function that is traced.
        with tf.init_scope():
            compat.build_optimizer(optimizer, variables)
            self._make_sums(optimizer, variables)
        reducer = reducer_of(reducing_optimizer(optimizer))
        # The reducer multiplies gradients by this factor for a sum over the ranks; ``last_pass`` divides by it.
        factor = 1
        if reducer is not None:
            factor = reducer.factor_for_mean
        # A variable that isn't reached by the loss has no gradient, and nothing is added to its sum.
        sums = {}
        for position, (gradient, variable) in enumerate(zip(gradients, variables)):
            if gradient is not None:
                sums[position] = self._sums[id(compat.inner_variable(variable))]
                sums[position].assign_add(gradient * factor)

        def last_pass() -> tf.Tensor:
            divisor = self._divisor * factor
            to_apply: list = [None] * len(gradients)
            for position, total in sums.items():
                to_apply[position] = total.read_value() / divisor
            apply(to_apply)
            for total in self._sums.values():
                # All sums begin anew, also those without a gradient in this step.
                total.assign(tf.zeros_like(total))
            return tf.constant(True)

        def other_pass() -> tf.Tensor:
            # Horovod counts every batch as an iteration.
            optimizer.iterations.assign_add(1)
            return tf.constant(False)

        return tf.cond(self._count.assign_add(1) % self.passes == 0, last_pass, other_pass)

    def _make_sums(self, optimizer: Any, variables: Sequence) -> None:
        """Make the variables in which this rank adds up gradients, which checkpoints keep."""
        inner_variables = map(compat.inner_variable, variables)
        without_sum = [variable for variable in inner_variables if id(variable) not in self._sums]
        if not without_sum:
            return
        # The count is in checkpoints, so that a resumed run updates after the same batch.
        if self._count is None:
            self._count = tf.Variable(0, trainable=False)
            compat.keep_in_checkpoints(optimizer, "npu_passes", [self._count])
        sums = []
        for variable in without_sum:
            zeros = tf.zeros(variable.shape, variable.dtype)
            sums.append(tf.Variable(zeros, trainable=False))
        # The name tells how many sums came before, since a model may be built in parts.
        compat.keep_in_checkpoints(optimizer, f"npu_sums_{len(self._sums)}", sums)
        self._sums.update(zip(map(id, without_sum), sums))
        reducer = reducer_of(reducing_optimizer(optimizer))
        if reducer is not None:
            note_partial_sums(reducer.world, sums, self._count, self.passes)
