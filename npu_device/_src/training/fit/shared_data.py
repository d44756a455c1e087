"""Arrays of ``load_once`` in ``fit``, ``evaluate`` and ``predict``: Keras makes one tensor of an array, which is a copy
on each rank. It is given tensors that lie in the shared memory instead, and draws the same batches from them.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from npu_device._src.training.distribute.load_once import load
from npu_device._src.world.shared_arrays import ALIGNMENT, is_shared
from npu_device._src.world.world import World

_DATA = ("x", "y", "sample_weight", "validation_data")


class _Arguments(Protocol):
    def get(self, name: str) -> Any: ...
    def set(self, name: str, argument: Any) -> None: ...


def split(arguments: _Arguments) -> None:
    """Do what ``validation_split`` asks for, as Keras does it, if there are shared arrays: Keras would copy a part."""
    fraction = arguments.get("validation_split")
    data = [arguments.get(name) for name in _DATA[:3]]
    arrays = [leaf for leaf in tf.nest.flatten(data) if leaf is not None]
    if not fraction or arguments.get("validation_data") is not None:
        return
    if not all(isinstance(array, np.ndarray) for array in arrays) or not any(
        map(is_shared, arrays)
    ):
        return
    length = min(len(array) for array in arrays)
    border = math.floor(length * (1.0 - fraction))
    # Left to Keras, which raises errors for an empty part and for arrays of different lengths.
    if not 0 < border < length or any(len(array) != length for array in arrays):
        return

    def part(start: int, end: int) -> list[Any]:
        cut = lambda leaf: None if leaf is None else leaf[start:end]  # noqa: E731
        return [tf.nest.map_structure(cut, structure) for structure in data]

    for name, structure in zip(_DATA, part(0, border)):
        if structure is not None:
            arguments.set(name, structure)
    # Keras takes a tuple without the weights if there are none.
    held_out = part(border, length)
    while held_out[-1] is None:
        held_out.pop()
    arguments.set("validation_data", tuple(held_out))
    arguments.set("validation_split", 0.0)


def pass_as_tensors(world: World, arguments: _Arguments) -> None:
    """Replace the shared arrays among the data by tensors that lie in the same memory."""
    for name in _DATA:
        given = arguments.get(name)
        # A dataset, or another object that Keras iterates over, has no arrays to replace.
        leaves = tf.nest.flatten(given)
        if any(map(is_shared, leaves)):
            tensors = [_tensor(world, leaf) if is_shared(leaf) else leaf for leaf in leaves]
            arguments.set(name, tf.nest.pack_sequence_as(given, tensors))


def _tensor(world: World, array: np.ndarray) -> Any:
    """Return an array as a tensor in shared memory; the array itself if Keras or TensorFlow would convert it anyhow."""
    # Strings and TensorFlow's own dtypes have no form that both sides read.
    if array.dtype.kind not in "biuf":
        return array
    dtype = array.dtype
    if dtype.kind == "f":
        # Keras converts numbers, and would make the converted copy on each rank.
        dtype = np.dtype(tf.keras.backend.floatx())
    fits = array.flags.c_contiguous and array.ctypes.data % ALIGNMENT == 0
    if dtype != array.dtype or not fits:
        # One copy on each host: Keras's conversion, or the layout that TensorFlow asks for.
        array = load(world, lambda: np.array(array, dtype, order="C"), quiet=True)
    # Numbers in the host's memory aren't copied by an operation, unlike by ``tf.constant``.
    with tf.device("CPU:0"):
        return tf.raw_ops.Identity(input=array)
