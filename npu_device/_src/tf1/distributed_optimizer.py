"""Optimizers of TensorFlow 1 that reduce their gradients over all ranks, and the calls that do it by hand.

Keras optimizers are left to ``training.optimizer_wrapper``, loss scaling to ``loss_scale``.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import tensorflow as tf

from npu_device._src.training import device, hccl_ops
from npu_device._src.training.groups import get_rank_size
from npu_device._src.training.optimizer_wrapper import npu_distributed_keras_optimizer_wrapper
from npu_device._src.training.reduce_values import all_reduce
from npu_device._src.training.variables import grouping_gradients_apply

_WRAPPED = "_npu_reduces_gradients"


class DelegatingOptimizer(tf.compat.v1.train.Optimizer):
    """A TensorFlow 1 optimizer around another one, which holds the slots and makes the updates."""

    def __init__(self, optimizer: Any, name: str) -> None:
        super().__init__(use_locking=False, name=name)
        self._optimizer = optimizer

    def compute_gradients(self, *args: Any, **kwargs: Any) -> list[tuple[Any, Any]]:
        return list(self._optimizer.compute_gradients(*args, **kwargs))

    def apply_gradients(self, *args: Any, **kwargs: Any) -> Any:
        return self._optimizer.apply_gradients(*args, **kwargs)

    def get_slot(self, *args: Any, **kwargs: Any) -> Any:
        return self._optimizer.get_slot(*args, **kwargs)

    def get_slot_names(self, *args: Any, **kwargs: Any) -> Any:
        return self._optimizer.get_slot_names(*args, **kwargs)

    def variables(self, *args: Any, **kwargs: Any) -> Any:
        return self._optimizer.variables(*args, **kwargs)


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

    def __init__(self, optimizer: Any, is_weight_update_sharding: bool = False, name: str | None = None) -> None:
        _require_unwrapped(optimizer)
        super().__init__(optimizer, name or f"Distributed{type(optimizer).__name__}")
        self._sharded = is_weight_update_sharding

    def compute_gradients(self, *args: Any, **kwargs: Any) -> list[tuple[Any, Any]]:
        return _averaged(super().compute_gradients(*args, **kwargs))

    def apply_gradients(self, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        if not self._sharded:
            return super().apply_gradients(grads_and_vars, *args, **kwargs)
        pairs = [(gradient, variable) for gradient, variable in grads_and_vars if gradient is not None]
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
    setattr(optimizer, _WRAPPED, True)
    optimizer.compute_gradients = MethodType(_compute_gradients, optimizer)
    return optimizer


def _require_unwrapped(optimizer: Any) -> None:
    if isinstance(optimizer, NPUDistributedOptimizer) or hasattr(optimizer, _WRAPPED):
        raise ValueError(
            f"this {type(optimizer).__name__} averages its gradients already; wrapped a second time it would do so "
            "twice.\nWhat to do: use either NPUDistributedOptimizer or npu_distributed_optimizer_wrapper, once per "
            "optimizer."
        )


def _compute_gradients(self: Any, *args: Any, **kwargs: Any) -> list[tuple[Any, Any]]:
    return _averaged(type(self).compute_gradients(self, *args, **kwargs))


def _averaged(pairs: Any) -> list[tuple[Any, Any]]:
    pairs = list(pairs)
    if device.unless_child() is None:
        return pairs
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
    return all_reduce(tensor, "mean" if average else "sum")


def reduce(tensor: Any, root_rank: int, average: bool = True, fusion: int = 0, fusion_id: int = -1) -> Any:
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
    total = hccl_ops.reduce(tensor, "sum", root_rank, fusion, fusion_id)
    size = get_rank_size()
    return total / tf.cast(size, total.dtype) if average and size > 1 else total
