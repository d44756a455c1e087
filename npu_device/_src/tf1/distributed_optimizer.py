"""Optimizers of TensorFlow 1 that reduce their gradients over all ranks, the calls that do it by hand, and loss
scaling: the scale, how it changes, and the step that is skipped on overflow. Keras's are left to ``training``.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import tensorflow as tf

from npu_device._src.training.distribute import ascend_collectives
from npu_device._src.training.distribute.groups import get_rank_size
from npu_device._src.training.distribute.reduce_values import all_reduce
from npu_device._src.training.distribute.variables import grouping_gradients_apply
from npu_device._src.training.opening import device
from npu_device._src.training.opening.current_world import world_unless_child
from npu_device._src.training.optimizers.loss_scale_optimizer import (
    all_finite,
    on_all_ranks,
    unscaled,
)
from npu_device._src.training.optimizers.optimizer_wrapper import (
    npu_distributed_keras_optimizer_wrapper,
)
from npu_device._src.training.sharding.divisible import tell_if_asked

_WRAPPED = "_npu_reduces_gradients"
_LARGEST = 3.4e38

GradientPairs = list[tuple[Any, Any]]
"""Gradients with their variables."""


class DelegatingOptimizer(tf.compat.v1.train.Optimizer):
    """A TensorFlow 1 optimizer around another one, which holds the slots and makes the updates."""

    def __init__(self, optimizer: Any, name: str) -> None:
        super().__init__(use_locking=False, name=name)
        self._optimizer = optimizer
        # The optimizer inside has the slots.
        for method in ("get_slot", "get_slot_names", "variables"):
            setattr(self, method, getattr(optimizer, method))

    def compute_gradients(self, *args: Any, **kwargs: Any) -> GradientPairs:
        return list(self._optimizer.compute_gradients(*args, **kwargs))

    def apply_gradients(self, *args: Any, **kwargs: Any) -> Any:
        return self._optimizer.apply_gradients(*args, **kwargs)


class NPUDistributedOptimizer(DelegatingOptimizer):
    """Averages the gradients over all ranks.

    Args:
        optimizer: a ``tf.compat.v1.train`` optimizer.
        is_weight_update_sharding: let each rank update its share of the variables, and send it to the others; the
            state of the optimizer is then sharded.
        name: default "Distributed" and the class name of the optimizer.

    Raises:
        ValueError: the optimizer averages its gradients already; or, in ``apply_gradients`` with sharding, there are
            fewer variables than ranks.

    ``compute_gradients`` returns the averages, reduced in segments by the split strategy (``hccl.split.api``) that
    travel while backward produces the others. On a single device, nothing changes.

    Source: Ascend TF Adapter 1.15, ``NPUDistributedOptimizer``.
    """

    def __init__(
        self, optimizer: Any, is_weight_update_sharding: bool = False, name: str | None = None
    ) -> None:
        _require_unwrapped(optimizer)
        super().__init__(optimizer, name or f"Distributed{type(optimizer).__name__}")
        self._sharded = is_weight_update_sharding
        if not is_weight_update_sharding:
            tell_if_asked(world_unless_child(), "it is an optimizer of TensorFlow 1")

    def compute_gradients(self, *args: Any, **kwargs: Any) -> GradientPairs:
        return _averaged(super().compute_gradients(*args, **kwargs))

    def apply_gradients(self, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        if not self._sharded:
            return super().apply_gradients(grads_and_vars, *args, **kwargs)
        pairs = [pair for pair in grads_and_vars if pair[0] is not None]
        return grouping_gradients_apply(super().apply_gradients, pairs, *args, **kwargs)


def npu_distributed_optimizer_wrapper(optimizer: Any) -> Any:
    """Return the same optimizer, which averages its gradients over all ranks; untouched on a single device.

    Args:
        optimizer: a ``tf.compat.v1.train`` optimizer, a Keras optimizer, or the name of one.

    Raises:
        ValueError: it averages its gradients already, and would do so twice.
        TypeError: not an optimizer.

    Source: Ascend TF Adapter 1.15, ``npu_distributed_optimizer_wrapper``.
    """
    if not isinstance(optimizer, tf.compat.v1.train.Optimizer):
        return npu_distributed_keras_optimizer_wrapper(optimizer)
    if device.unless_child() is None:
        return optimizer
    _require_unwrapped(optimizer)
    tell_if_asked(world_unless_child(), "it is an optimizer of TensorFlow 1")
    # The mark shows a second wrapper that the optimizer is wrapped.
    setattr(optimizer, _WRAPPED, True)
    # The method is replaced on the object, so that other optimizers of its class stay as they are.
    optimizer.compute_gradients = MethodType(_compute_gradients, optimizer)
    return optimizer


def _require_unwrapped(optimizer: Any) -> None:
    if isinstance(optimizer, NPUDistributedOptimizer) or hasattr(optimizer, _WRAPPED):
        raise ValueError(
            f"this {type(optimizer).__name__} averages its gradients already; wrapped a second time it would do so "
            "twice.\nWhat to do: use either NPUDistributedOptimizer or npu_distributed_optimizer_wrapper, once per "
            "optimizer."
        )


def _compute_gradients(self: Any, *args: Any, **kwargs: Any) -> GradientPairs:
    # The class still has the method that doesn't average.
    return _averaged(type(self).compute_gradients(self, *args, **kwargs))


def _averaged(pairs: Any) -> GradientPairs:
    pairs = list(pairs)
    if device.unless_child() is None:
        return pairs
    # The split strategy takes all gradients together.
    averages = all_reduce([gradient for gradient, _ in pairs])
    return [(average, variable) for average, (_, variable) in zip(averages, pairs)]


def KerasDistributeOptimizer(optimizer: Any, name: str = "NpuKerasOptimizer", **kwargs: Any) -> Any:
    """Return the same Keras optimizer as ``npu.distribute.npu_distributed_keras_optimizer_wrapper`` does.

    Args:
        optimizer: a Keras optimizer.
        name: without effect, like ``kwargs``: the optimizer keeps its own name.

    Raises:
        ValueError: the optimizer is wrapped already.
        TypeError: not a Keras optimizer.

    Source: Ascend TF Adapter 1.15, ``KerasDistributeOptimizer``.
    """
    return npu_distributed_keras_optimizer_wrapper(optimizer)


npu_allreduce = all_reduce  # Source: Ascend TF Adapter 1.15, ``npu_allreduce``.


def allreduce(tensor: Any, average: bool = True) -> Any:
    """Return the sum or mean of a tensor over all ranks.

    Args:
        tensor: a tensor or ``tf.IndexedSlices``.
        average: the mean (default), or the sum.

    Raises:
        RuntimeError: another rank has failed or left.

    Source: Ascend TF Adapter 1.15, ``npu_optimizer.allreduce``.
    """
    if average:
        return all_reduce(tensor)
    return all_reduce(tensor, "sum")


def reduce(
    tensor: Any, root_rank: int, average: bool = True, fusion: int = 0, fusion_id: int = -1
) -> Any:
    """Return the sum or mean of a tensor over all ranks on one of them; zeros on the others.

    Args:
        tensor: a tensor of any shape.
        root_rank: the rank that gets the result.
        average: the mean (default), or the sum.
        fusion, fusion_id: without effect: 0, or 2 with an id from 0.

    Raises:
        RuntimeError: another rank has failed or left.

    Source: Ascend TF Adapter 1.15, ``npu_optimizer.reduce``.
    """
    total = ascend_collectives.reduce(tensor, "sum", root_rank, fusion, fusion_id)
    size = get_rank_size()
    if not average or size == 1:
        return total
    return total / tf.cast(size, total.dtype)


class FixedLossScaleManager:
    """A constant loss scale.

    Args:
        loss_scale: from 1.
        enable_overflow_check: skip steps whose gradients overflow (default); otherwise every step is made.

    Raises:
        ValueError: ``loss_scale`` is below 1.

    Source: Ascend TF Adapter 1.15, ``FixedLossScaleManager``.
    """

    def __init__(self, loss_scale: float, enable_overflow_check: bool = True) -> None:
        if loss_scale < 1:
            raise ValueError(f"the loss scale must be at least 1; found {loss_scale!r}")
        self._loss_scale = float(loss_scale)
        self.enable_overflow_check = enable_overflow_check

    def get_loss_scale(self) -> tf.Tensor:
        """Return the scale: float32, shape []."""
        return tf.constant(self._loss_scale, tf.float32)

    def update_loss_scale(self, finite_grads: tf.Tensor) -> Any:
        """Return an operation that does nothing.

        Args:
            finite_grads: ignored.
        """
        return tf.no_op()


class ExponentialUpdateLossScaleManager:
    """A loss scale that grows while gradients are finite and shrinks when they aren't, never below 1.

    Args:
        init_loss_scale: the first scale, from 1.
        incr_every_n_steps: after so many finite steps in a row the scale grows.
        decr_every_n_nan_or_inf: after so many steps with overflow since the last change it shrinks.
        incr_ratio: the factor by which it grows.
        decr_ratio: the factor by which it shrinks.

    Raises:
        ValueError: ``init_loss_scale`` is below 1.

    Its variables are global ones of the graph: initialised and saved with the others.

    Source: Ascend TF Adapter 1.15, ``ExponentialUpdateLossScaleManager``.
    """

    enable_overflow_check = True

    def __init__(
        self,
        init_loss_scale: float,
        incr_every_n_steps: int,
        decr_every_n_nan_or_inf: int = 2,
        incr_ratio: float = 2,
        decr_ratio: float = 0.8,
    ) -> None:
        if init_loss_scale < 1:
            raise ValueError(f"the loss scale must be at least 1; found {init_loss_scale!r}")
        self._incr_every = incr_every_n_steps
        self._decr_every = decr_every_n_nan_or_inf
        self._incr_ratio = incr_ratio
        self._decr_ratio = decr_ratio
        self._scale = _variable(float(init_loss_scale), tf.float32, "loss_scale")
        self._good = _variable(0, tf.int32, "good_steps")
        self._bad = _variable(0, tf.int32, "bad_steps")

    def get_loss_scale(self) -> tf.Tensor:
        """Return the scale: float32, shape []."""
        return tf.convert_to_tensor(self._scale)

    def update_loss_scale(self, finite_grads: tf.Tensor) -> Any:
        """Return the operation that counts a step, and changes the scale if it is time.

        Args:
            finite_grads: whether the gradients of the step were finite; bool, shape [].
        """
        scale = self._scale.read_value()
        good = tf.where(finite_grads, self._good.read_value() + 1, 0)
        overflows = tf.logical_not(finite_grads)
        bad = self._bad.read_value() + tf.cast(overflows, tf.int32)
        grow = tf.logical_and(finite_grads, good >= self._incr_every)
        shrink = tf.logical_and(overflows, bad >= self._decr_every)
        # The scale stops growing where it would be infinite in float32.
        can_grow = scale < _LARGEST / self._incr_ratio
        larger = tf.where(can_grow, scale * self._incr_ratio, scale)
        smaller = tf.maximum(scale * self._decr_ratio, 1.0)
        changes = tf.logical_or(grow, shrink)
        is_unchanged = tf.cast(tf.logical_not(changes), tf.int32)
        # Everything is read before the first write, since a read of a TensorFlow 1 variable may see what another
        # operation of the same run writes.
        with tf.control_dependencies([grow, shrink, larger, smaller, good, bad]):
            new_scale = tf.where(shrink, smaller, scale)
            new_scale = tf.where(grow, larger, new_scale)
            set_scale = self._scale.assign(new_scale)
            set_good = self._good.assign(good * is_unchanged)
            set_bad = self._bad.assign(bad * is_unchanged)
            return tf.group(set_scale, set_good, set_bad)


def _variable(initial: Any, dtype: tf.DType, name: str) -> Any:
    return tf.compat.v1.Variable(initial, trainable=False, dtype=dtype, name=name)


class NPULossScaleOptimizer(DelegatingOptimizer):
    """Scales the loss, divides the gradients by the scale, and skips steps whose gradients are not finite.

    Args:
        opt: a ``tf.compat.v1.train`` optimizer, an ``NPUDistributedOptimizer`` for instance.
        loss_scale_manager: one of the managers of this module.
        is_distributed: let the ranks agree on whether the gradients are finite on all of them. Without it they must be
            the same on all ranks, as those of an ``NPUDistributedOptimizer`` are.

    Source: Ascend TF Adapter 1.15, ``NPULossScaleOptimizer``; instead of the overflow flag of an NPU, the gradients
    themselves are checked here.
    """

    def __init__(self, opt: Any, loss_scale_manager: Any, is_distributed: bool = False) -> None:
        super().__init__(opt, f"NPULossScaleOptimizer{type(opt).__name__}")
        self._manager = loss_scale_manager
        self._is_distributed = is_distributed

    def compute_gradients(self, loss: Any, *args: Any, **kwargs: Any) -> GradientPairs:
        scale = self._manager.get_loss_scale()

        def scaled(loss: tf.Tensor) -> tf.Tensor:
            return loss * tf.cast(scale, loss.dtype)

        if callable(loss):
            # A loss in eager mode is a function, which is scaled when it is called.
            scaled_loss: Any = lambda: scaled(loss())  # noqa: E731
        else:
            scaled_loss = scaled(loss)
        pairs = super().compute_gradients(scaled_loss, *args, **kwargs)
        return [(unscaled(gradient, scale), variable) for gradient, variable in pairs]

    def apply_gradients(
        self, grads_and_vars: Any, global_step: Any = None, name: str | None = None
    ) -> Any:
        pairs = list(grads_and_vars)
        finite = all_finite([gradient for gradient, _ in pairs])
        if self._is_distributed:
            finite = on_all_ranks(finite)

        def apply() -> tf.Tensor:
            applied = super(NPULossScaleOptimizer, self).apply_gradients(pairs, global_step, name)
            with tf.control_dependencies([applied]):
                # Both branches of ``tf.cond`` have to return the same type.
                return tf.constant(True)

        if self._manager.enable_overflow_check:
            applied = tf.cond(finite, apply, lambda: tf.constant(False))
        else:
            applied = apply()
        # The scale changes after overflow as well.
        return tf.group(applied, self._manager.update_loss_scale(finite))


def NPUOptimizer(
    opt: Any,
    loss_scale_manager: Any = None,
    is_distributed: bool = False,
    is_loss_scale: bool = False,
    is_tailing_optimization: bool = False,
    name: str | None = None,
) -> Any:
    """Return an ``NPUDistributedOptimizer``, an ``NPULossScaleOptimizer``, the latter around the former, or ``opt``.

    Args:
        opt: a ``tf.compat.v1.train`` optimizer.
        loss_scale_manager: one of the managers of this module; needed with ``is_loss_scale``.
        is_distributed: average the gradients over all ranks.
        is_loss_scale: scale the loss.
        is_tailing_optimization: without effect: it is about when an NPU looks for overflows.
        name: name of the averaging optimizer.

    Raises:
        ValueError: ``is_loss_scale`` without a manager.

    Source: Ascend TF Adapter 1.15, ``NPUOptimizer``.
    """
    if is_loss_scale and loss_scale_manager is None:
        raise ValueError(
            "NPUOptimizer(is_loss_scale=True) needs a loss_scale_manager, and there is none"
        )
    if is_distributed:
        opt = NPUDistributedOptimizer(opt, name=name)
    if is_loss_scale:
        return NPULossScaleOptimizer(opt, loss_scale_manager, is_distributed)
    return opt
