"""Horovod calls that give all ranks the variables or objects of the root."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Callable

import tensorflow as tf

from npu_device._src.collectives.graph import after
from npu_device._src.horovod.shared_arguments import described
from npu_device._src.horovod.tensor_ops import operation
from npu_device._src.tf1 import hooks
from npu_device._src.training.distribute import ranks
from npu_device._src.training.distribute.variables import broadcast
from npu_device._src.world.world import value_of


@operation
def broadcast_variables(variables: Iterable, root_rank: int) -> Any:
    """Return the operation that overwrites variables with those of the root; eagerly, do it and return None."""
    variables = list(variables)
    assignment = None
    if variables:
        assignment = broadcast(variables, root_rank)
    if assignment is None and not tf.executing_eagerly():
        # It runs anyway. Scripts return this from a branch of tf.cond, whose other branch is a tensor.
        assignment = tf.no_op()
    return assignment


@operation
def broadcast_(variables: Iterable, root_rank: int) -> list[tf.Tensor]:
    """Return the values of variables, which are overwritten with those of the root."""
    variables = list(variables)
    with after(broadcast_variables(variables, root_rank)):
        return [tf.identity(value_of(variable)) for variable in variables]


@described
def broadcast_global_variables(root_rank: int) -> Any:
    """Return the operation that overwrites the global variables of the graph with those of the root."""
    if tf.executing_eagerly():
        raise RuntimeError(
            "eager mode has no global variables.\nWhat to do: hvd.broadcast_variables(variables)"
        )
    return hooks.broadcast_global_variables(root_rank)


@described
class BroadcastGlobalVariablesHook(hooks.NPUBroadcastGlobalVariablesHook):
    """Gives all ranks the global variables of the root when the session has been made or restored."""

    def __init__(self, root_rank: int, device: str = "") -> None:
        super().__init__(root_rank)


@operation
def broadcast_object(obj: Any, root_rank: int = 0) -> Any:
    """Return the Python object of the root, also while a graph is built."""
    return ranks.broadcast_object(obj, root_rank)


@described
def broadcast_object_fn(root_rank: int = 0, **arguments: Any) -> Callable[[Any], Any]:
    """Return ``broadcast_object`` for this root."""
    return lambda obj: broadcast_object(obj, root_rank, **arguments)


@operation
def allgather_object(obj: Any) -> list:
    """Return the Python objects of all ranks, by rank, also while a graph is built."""
    return ranks.gather_object(obj)
