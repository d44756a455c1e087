"""The operations of a graph that draw random numbers, and those that mix the rank into the state of a generator."""

from __future__ import annotations

import tensorflow as tf

from npu_device._src import compat

MARK = "npu_device_numbers_of_rank"
"""Name of the operation that mixes the rank into the state of a generator."""

# The operations that make seeds from seeds.
_SEEDS = ("StatelessRandomGet", "StatelessRandomUniformFullInt")

_have_seeds: dict[str, bool] = {}
"""By the type of an operation."""


def is_stateful(operation: tf.Operation) -> bool:
    """Return True for a random operation that keeps its state to itself, such as that of ``tf.random.normal``."""
    # Asked once for a type: a graph has thousands of operations of a few types.
    if operation.type not in _have_seeds:
        attributes = {attribute.name for attribute in operation.op_def.attr}
        _have_seeds[operation.type] = {"seed", "seed2"} <= attributes
    return _have_seeds[operation.type]


def is_draw(operation: tf.Operation) -> bool:
    """Return True where a step draws: a stateful operation, or the mark at the state of a generator."""
    name = operation.name.rpartition("/")[2]
    return name.startswith(MARK) or is_stateful(operation)


def drawing_operations(draw: tf.Operation) -> list[tf.Operation]:
    """Return the operations whose numbers a draw decides on; none if one is in a branch, loop or function."""
    if is_stateful(draw):
        return [draw]

    def users(operation: tf.Operation) -> list[tf.Operation]:
        # Seeds that are themselves drawn are followed to what is drawn from them.
        if _draws_from_seeds(operation):
            return []
        return [user for tensor in operation.outputs for user in tensor.consumers()]

    operations = list(compat.walk([draw], users))
    if any(map(compat.functions_of, operations)):
        return []
    return list(filter(_draws_from_seeds, operations))


def _draws_from_seeds(operation: tf.Operation) -> bool:
    return operation.type.startswith("Stateless") and not operation.type.startswith(_SEEDS)
