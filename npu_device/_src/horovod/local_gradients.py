"""Gradients that a rank keeps: those of several batches until they are reduced, and those of variables of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from npu_device._src import compat
from npu_device._src.gradients.reduction import weighted
from npu_device._src.training.distribute import ranks
from npu_device._src.training.watching.own_parts import warn_of_file
from npu_device._src.training.watching.wrapped_optimizers import carrier, reducer_of

_as_it_is = compat.do_not_convert


class LocalSources:
    """The variables that each rank trains by itself: their gradients aren't reduced.

    Args:
        scales: gradients are divided by the number of ranks. The losses of all ranks may depend on such a variable, and
            its gradient is their sum.
    """

    def __init__(self, scales: bool) -> None:
        self._factor = 1.0
        if scales:
            self._factor /= ranks.size()
        self._variables: list = []

    def add(self, variable: Any) -> None:
        # The inner variable is kept, since Keras wraps it anew where a script asks for it.
        self._variables.append(compat.inner_variable(variable))

    def has(self, variable: Any) -> bool:
        inner = compat.inner_variable(variable)
        return any(inner is local for local in self._variables)

    def scaled(self, gradient: Any) -> Any:
        """Return the gradient of such a variable, as Horovod returns it."""
        if gradient is None:
            return None
        return weighted(gradient, self._factor)


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
        self._dense = sparse_as_dense
        self.passes = backward_passes_per_step
        self._divisor = 1
        if average_aggregated_gradients:
            self._divisor = backward_passes_per_step
        self._sums: dict[int, Any] = {}  # sums by the id of the trained variable
        self._count: Any = None
        self._is_inside = False

    def made_dense(self, gradients: Sequence) -> list:
        """Return gradients, with sparse ones made dense if that is asked for."""
        if not self._dense:
            return list(gradients)
        return [
            tf.convert_to_tensor(gradient) if isinstance(gradient, tf.IndexedSlices) else gradient
            for gradient in gradients
        ]

    def install(self, optimizer: Any) -> None:
        """Put this before the methods of the optimizer, if anything is asked for."""
        if not self._dense and self.passes == 1:
            return
        if self.passes > 1:
            self._keep_sums(optimizer)
        # The optimizer's own methods, taken before they are replaced below.
        apply_pairs: Any = optimizer.apply_gradients
        apply_lists: Any = getattr(optimizer, "apply", None)

        @_as_it_is
        def apply_gradients(grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
            gradients, variables = map(list, zip(*grads_and_vars))
            go_on = lambda summed: apply_pairs(list(zip(summed, variables)), *args, **kwargs)  # noqa: E731
            return self.enter(optimizer, gradients, variables, go_on)

        @_as_it_is
        def apply(grads: Any, trainable_variables: Any = None) -> Any:
            variables = compat.variables_to_update(optimizer, trainable_variables)
            return self.enter(
                optimizer,
                list(grads),
                variables,
                lambda summed: apply_lists(summed, trainable_variables),
            )

        optimizer.apply_gradients = apply_gradients
        if apply_lists is not None:
            optimizer.apply = apply

    def _keep_sums(self, optimizer: Any) -> None:
        """Let checkpoints keep what this rank has added up, and other files cause a warning."""
        build: Any = getattr(optimizer, "build", None)
        save: Any = getattr(optimizer, "save_own_variables", None)
        children: Any = optimizer._trackable_children

        def build_with_sums(variables: Any) -> None:
            build(variables)
            self._make_sums(optimizer, variables)

        def save_own_variables(store: Any) -> None:
            warn_of_file(optimizer, self._sums.values())
            save(store)

        def trackable_children(save_type: str = "checkpoint", **kwargs: Any) -> Any:
            if save_type == "checkpoint":
                warn_of_file(optimizer, self._sums.values())
            return children(save_type, **kwargs)

        # Legacy optimizers of tf-keras have no ``build``.
        if build is not None:
            optimizer.build = build_with_sums
        if save is not None:
            optimizer.save_own_variables = save_own_variables
        optimizer._trackable_children = trackable_children

    def enter(self, optimizer: Any, gradients: Sequence, variables: Sequence, apply: Any) -> Any:
        """Apply gradients, or only add them up if it isn't time yet."""
        # ``apply_gradients`` of Keras calls ``apply``.
        if self._is_inside:
            return apply(gradients)
        self._is_inside = True
        try:
            gradients = self.made_dense(gradients)
            if self.passes == 1:
                return apply(gradients)
            return self._accumulate(optimizer, gradients, variables, apply)
        finally:
            self._is_inside = False

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
        reducer = reducer_of(carrier(optimizer))
        # Undone below: the reducer multiplies gradients by this for a sum over the ranks.
        factor = 1
        if reducer is not None:
            factor = reducer.factor
        # A variable that isn't reached by the loss has no gradient, and nothing is added to its sum.
        sums: list = [None] * len(gradients)
        for position, (gradient, variable) in enumerate(zip(gradients, variables)):
            if gradient is not None:
                sums[position] = self._sums[id(compat.inner_variable(variable))]
                sums[position].assign_add(gradient * factor)

        def last_pass() -> tf.Tensor:
            divisor = self._divisor * factor
            apply([total if total is None else total.read_value() / divisor for total in sums])
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
        new = []
        for variable in map(compat.inner_variable, variables):
            if id(variable) not in self._sums:
                new.append(variable)
        if not new:
            return
        # The count is in checkpoints, so that a resumed run updates after the same batch.
        if self._count is None:
            self._count = tf.Variable(0, trainable=False)
            compat.keep_in_checkpoints(optimizer, "npu_passes", [self._count])
        sums = []
        for variable in new:
            sums.append(tf.Variable(tf.zeros(variable.shape, variable.dtype), trainable=False))
        # The name has a number, since variables may be added when a model is built in parts.
        compat.keep_in_checkpoints(optimizer, f"npu_sums_{len(self._sums)}", sums)
        self._sums.update(zip(map(id, new), sums))
        reducer = reducer_of(carrier(optimizer))
        if reducer is not None:
            reducer.note_parts(sums, self._count, self.passes)
