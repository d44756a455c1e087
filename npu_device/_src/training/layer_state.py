"""What layers hold outside variables, which is compared, not sent: tables, what they adapted to, constant tensors."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from npu_device._src import compat
from npu_device._src.cluster.frames import counted
from npu_device._src.training.digests import checksum
from npu_device._src.training.world import World

_WHILE_ADAPTING = ("summary",)  # attributes for ``adapt`` only: samples that differ may well give the same result

State = dict[str, tuple[str, int]]  # by the name of an attribute, what to call it in a message and a checksum


def require_same(world: World, layers: Sequence[Any], constants: bool = True) -> None:
    """Compare what the same layers hold on all ranks; ``constants``: tensors also of those that don't adapt to data."""
    mine = [(layer.name, state_of(layer, constants)) for layer in layers]
    everybody = world.objects(mine, "what layers hold outside variables")
    if any(len(each) != len(mine) for each in everybody):
        return  # the ranks have different models, which their variables show
    for place, (name, state) in enumerate(mine):
        states: list[State] = [each[place][1] for each in everybody]
        for attribute in state:
            found = [each.get(attribute, ("nothing", 0)) for each in states]
            if any(each != found[0] for each in found):
                lines = world.lines(f"{text}, checksum {value:08x}" for text, value in found)
                raise ValueError(
                    f"the layer {name!r} holds different values of {attribute!r} on the ranks:\n{lines}\n"
                    "Likely cause: the layer adapted to data that were already divided among the ranks, or its "
                    "values are computed at random without a seed.\nWhat to do: call adapt on the same data on every "
                    "rank, before they are divided; for random values, call npu.open(seed=1) right after the imports."
                )


def state_of(layer: Any, constants: bool = True) -> State:
    """Return what a layer holds outside variables; see ``require_same``."""
    state: State = {}
    if hasattr(layer, "get_vocabulary"):
        words = list(layer.get_vocabulary())
        state["vocabulary"] = counted(len(words), "word"), zlib.crc32(repr(words).encode())
    for name, value in sorted(vars(layer).items()):
        if all(hasattr(value, part) for part in ("lookup", "key_dtype", "value_dtype", "resource_handle")):
            if "vocabulary" not in state:  # whose tables have counts of what the layer has adapted to, too
                state[name] = _of_table(value)
        elif (constants or hasattr(layer, "adapt")) and name not in _WHILE_ADAPTING:
            found = _array(value, lists=hasattr(layer, "adapt"))
            if found is not None:
                state[name] = f"{found.dtype} {list(found.shape)}", checksum(found)
    return state


def _of_table(table: Any) -> tuple[str, int]:
    try:
        keys, values = tf.raw_ops.LookupTableExportV2(
            table_handle=table.resource_handle, Tkeys=table.key_dtype, Tvalues=table.value_dtype
        )
    except (tf.errors.OpError, ValueError):  # not initialized yet, or of a graph
        return "a table", 0
    pairs = sorted(zip(map(repr, keys.numpy().tolist()), map(repr, values.numpy().tolist())))
    return f"a table with {counted(len(pairs), 'key')}", zlib.crc32(repr(pairs).encode())


def _array(value: Any, lists: bool) -> np.ndarray | None:
    """Return the values of a constant, which may be a list if ``lists`` is True; None for anything else."""
    if isinstance(value, np.ndarray):
        return value
    if isinstance(value, tf.Tensor) and not tf.is_symbolic_tensor(value) and value.dtype != tf.resource:
        return None if value.dtype == tf.variant else compat.to_array(value)
    if lists and isinstance(value, list) and all(isinstance(each, (float, np.floating, str)) for each in value):
        return np.asarray(value)
    return None
