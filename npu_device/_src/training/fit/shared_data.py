"""Arrays of ``load_once`` in ``fit``, ``evaluate`` and ``predict``: Keras makes one tensor of an array, which is a copy
on each rank. It is given tensors that lie in the shared memory instead, and draws the same batches from them.
"""

from __future__ import annotations

import logging
import math
import operator
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from npu_device._src import compat
from npu_device._src.training.distribute.load_once import load
from npu_device._src.world.share import run_of
from npu_device._src.world.shared_arrays import ALIGNMENT, is_shared
from npu_device._src.world.world import World

_log = logging.getLogger("npu_device")
_DATA = ("x", "y", "sample_weight", "validation_data")


class _Arguments(Protocol):
    def get(self, name: str) -> Any: ...
    def set(self, name: str, argument: Any) -> None: ...


def split_validation(arguments: _Arguments) -> None:
    """Do what ``validation_split`` asks for, as Keras does it, if there are shared arrays: Keras would copy a part."""
    fraction = arguments.get("validation_split")
    data = [arguments.get(name) for name in _DATA[:3]]
    arrays = [leaf for leaf in tf.nest.flatten(data) if leaf is not None]
    if not fraction or arguments.get("validation_data") is not None:
        return
    can_be_cut = all(isinstance(array, (np.ndarray, tf.Tensor)) for array in arrays)
    if not can_be_cut or not any(map(is_shared, arrays)):
        return
    lengths = set(map(len, arrays))
    length = min(lengths)
    border = math.floor(length * (1.0 - fraction))
    # Left to Keras, which raises errors for an empty part and for arrays of different lengths.
    if not 0 < border < length or len(lengths) > 1:
        return
    for name, structure in zip(_DATA, run_of(data, length, 0, border, "first")):
        if structure is not None:
            arguments.set(name, structure)
    # Keras takes a tuple without the weights if there are none.
    held_out = run_of(data, length, border, length, "first")
    while held_out[-1] is None:
        held_out.pop()
    arguments.set("validation_data", tuple(held_out))
    arguments.set("validation_split", 0.0)


def pass_as_tensors(world: World, model: Any, arguments: _Arguments) -> bool:
    """Replace the shared arrays among the data by tensors that lie in the same memory; return True if all data do."""
    are_all_shared = True
    for name in _DATA:
        given = arguments.get(name)
        # A dataset, or another object that Keras iterates over, has no arrays to replace.
        leaves = tf.nest.flatten(given)
        tensors = leaves
        if any(map(is_shared, leaves)):
            tensors = [_tensor(world, model, leaf, name) for leaf in leaves]
            arguments.set(name, tf.nest.pack_sequence_as(given, tensors))
        if name != "validation_data" and given is not None:
            are_all_shared &= all(map(operator.is_not, leaves, tensors))
    return are_all_shared


def pass_as_batches(world: World, model: Any, arguments: _Arguments) -> None:
    """Replace the tensors that a ``fit`` trains on by the batches that Keras would make of them.

    Keras keeps up to five lists of the numbers of all rows on each rank. Here, the ranks of a host share the list in
    order, and each has the shuffled one.
    """
    structures = [arguments.get(name) for name in _DATA[:3]]
    # Of a list, ``tf.data`` would make one tensor.
    x, y, sample_weight = compat.tuples_for_lists(structures)
    shuffle = arguments.get("shuffle")
    if shuffle is None:
        shuffle = True
    steps = arguments.get("steps_per_epoch")
    leaves = tf.nest.flatten([x, y, sample_weight])
    counts = {len(leaf) for leaf in leaves if leaf is not None}
    # Left to Keras, which spreads weights over outputs, shuffles within batches, or raises an error.
    is_special = sample_weight is not None and tf.nest.is_nested(y)
    if arguments.get("class_weight") or not isinstance(shuffle, bool) or is_special:
        return
    if len(counts) != 1 or (steps is not None and steps < 1):
        return
    [count] = counts
    if not 0 < count < 1 << 31:
        return
    size = arguments.get("batch_size") or 32
    if steps and not arguments.get("batch_size"):
        size = math.ceil(count / steps)
    keras = compat.keras_of(model)
    samples = keras.utils.pack_x_y_sample_weight(x, y, sample_weight)
    in_order = load(world, lambda: np.arange(count, dtype=np.int32), quiet=True)
    step_count = math.ceil(count / size)
    if compat.is_keras_3(keras):
        batches = _batches(samples, _aliased(in_order), size, shuffle, 1)
        batches = batches.apply(tf.data.experimental.assert_cardinality(step_count))
    else:
        # tf-keras takes the batches of all epochs from one iterator.
        epochs = (arguments.get("epochs") or 1) - (arguments.get("initial_epoch") or 0)
        batches = _batches(samples, _aliased(in_order), size, shuffle, epochs)
        arguments.set("steps_per_epoch", steps or step_count)
    changed = {"x": batches, "y": None, "sample_weight": None, "shuffle": False}
    for name, argument in changed.items():
        arguments.set(name, argument)


def _batches(samples: Any, in_order: Any, size: int, shuffle: bool, epochs: int) -> tf.data.Dataset:
    """Return the batches of tensors in the order in which Keras draws them: by the same operations."""
    count = len(in_order)
    full_rows = count // size * size

    def drawn(_: Any) -> Any:
        if shuffle:
            return tf.random.shuffle(in_order)
        return in_order

    def cut(numbers: Any) -> tf.data.Dataset:
        rows = tf.reshape(numbers[:full_rows], [count // size, size])
        groups = tf.data.Dataset.from_tensor_slices(rows)
        if full_rows == count:
            return groups
        remainder = tf.data.Dataset.from_tensors(numbers[full_rows:])
        return groups.concatenate(remainder)

    def picked(numbers: Any, tensors: Any) -> Any:
        return tf.nest.map_structure(lambda tensor: tf.gather(tensor, numbers), tensors)

    orders = tf.data.Dataset.range(epochs).map(drawn).prefetch(1)
    numbers = orders.flat_map(cut)
    tensors = tf.data.Dataset.from_tensors(samples).repeat()
    pairs = tf.data.Dataset.zip((numbers, tensors))
    options = tf.data.Options()
    options.experimental_optimization.apply_default_optimizations = False
    options.experimental_external_state_policy = tf.data.experimental.ExternalStatePolicy.IGNORE
    batches = pairs.map(picked, num_parallel_calls=tf.data.AUTOTUNE)
    return batches.with_options(options).prefetch(tf.data.AUTOTUNE)


def _tensor(world: World, model: Any, array: Any, name: str) -> Any:
    """Return a shared array as a tensor in the same memory; other data, and what can't be shared, as they are."""
    if not is_shared(array):
        return array
    dtype = _dtype_of_tensor(array.dtype, compat.keras_of(model))
    if dtype is None:
        if array.dtype.kind in "SU" and world.is_main:
            # Other dtypes are an error of Keras.
            _log.warning(
                "load_once: %s is an array of strings (%s, shape %s), of which TensorFlow makes a copy on each rank.\n"
                "What to do: convert strings to numbers in the function of load_once.",
                name,
                array.dtype,
                array.shape,
            )
        return array
    fits = array.flags.c_contiguous and array.ctypes.data % ALIGNMENT == 0
    if dtype != array.dtype or not fits:
        # One copy on each host: Keras's conversion, or the layout that TensorFlow asks for.
        array = load(world, lambda: np.array(array, dtype, order="C"), quiet=True)
    return _aliased(array)


def _aliased(array: np.ndarray) -> Any:
    """Return a tensor in the memory of an array."""
    # Numbers in the host's memory aren't copied by an operation, unlike by ``tf.constant``.
    with tf.device("CPU:0"):
        return tf.raw_ops.Identity(input=array)


def _dtype_of_tensor(dtype: np.dtype, keras: Any) -> np.dtype | None:
    """Return the dtype of the tensor that Keras makes of an array; None if TensorFlow shares no memory of that kind."""
    try:
        tensor_dtype = tf.as_dtype(dtype)
    except TypeError:
        return None
    if tensor_dtype == tf.string:
        return None
    # tf-keras leaves bfloat16, which numpy doesn't count as a float, as it is.
    if dtype.kind == "f" or (tensor_dtype.is_floating and compat.is_keras_3(keras)):
        # Keras would make the converted copy on each rank.
        return np.dtype(keras.backend.floatx())
    return dtype.newbyteorder("=")
