"""all_gather_v: every rank gets everybody's tensor, one after the other along the first dimension, which may differ
among ranks.
"""

from __future__ import annotations

import tensorflow as tf

from npu_device.cluster.runtime import Runtime
from npu_device.collectives import tensorflow_backend as backend
from npu_device.collectives.group import Group

# Lossless carriers of the dtypes that TensorFlow's gather doesn't take.
_CARRIERS = {
    tf.bfloat16: tf.float32,
    tf.bool: tf.int32,
    tf.int8: tf.int32,
    tf.int16: tf.int32,
    tf.uint8: tf.int32,
    tf.uint16: tf.int32,
    tf.uint32: tf.int64,
}


def all_gather_v(runtime: Runtime, tensor: tf.Tensor, group: Group) -> tf.Tensor:
    """Gather tensors whose first dimension may differ among the ranks.

    Args:
        runtime: the running cluster.
        tensor: shape [n, …] where n is each rank's own and the rest is the same everywhere.
        group: the group, of which this rank is a member.

    Returns:
        Shape [sum of n, …], ordered by rank, the same on every rank.

    Raises:
        ValueError: a scalar.
        TypeError: a dtype that can't be gathered.
    """
    if tensor.shape.rank == 0:
        raise ValueError(
            "all_gather_v gathers along the first dimension and was given a scalar; give it shape [1]: "
            "tensor[tf.newaxis]"
        )
    carrier = _CARRIERS.get(tensor.dtype, tensor.dtype)
    if carrier not in backend.GATHER_DTYPES:
        raise TypeError(
            f"all_gather_v can't gather dtype {tensor.dtype.name}; expected one of "
            f"{', '.join(dtype.name for dtype in (*backend.GATHER_DTYPES, *_CARRIERS))}. Cast the tensor first."
        )
    size = group.size
    rows = tf.shape(tensor)[0]
    row_shape = tf.shape(tensor)[1:]
    all_rows = backend.all_gather(runtime, rows[tf.newaxis], group)
    # TensorFlow's gather wants equal sizes: everybody pads to the longest, and the padding is cut out afterwards. It
    # crashes on tensors without elements (seen with TensorFlow 2.20), so that at least one is sent.
    counts = all_rows * tf.reduce_prod(row_shape)
    longest = tf.maximum(tf.reduce_max(counts), 1)
    flat = tf.reshape(tf.cast(tensor, carrier), [-1])
    padded = tf.pad(flat, [[0, longest - tf.size(flat)]])
    gathered = tf.reshape(backend.all_gather(runtime, padded, group), [size, longest])
    elements = tf.concat([gathered[rank, : counts[rank]] for rank in range(size)], axis=0)
    result = tf.reshape(elements, tf.concat([[tf.reduce_sum(all_rows)], row_shape], axis=0))
    result.set_shape([None, *tensor.shape[1:]] if tensor.shape.rank else None)
    return tf.cast(result, tensor.dtype)
