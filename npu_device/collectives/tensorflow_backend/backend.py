"""What the operations ask of a backend, composed of TensorFlow's kernels: lists, every dtype, any number of elements.

TensorFlow's kernels take few dtypes, and crash the process on tensors without elements (seen with TensorFlow 2.20).
Narrow integers are reduced as wider ones, what is only moved travels as 32-bit words, and at least one element is sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Callable

import tensorflow as tf

from npu_device.cluster.runtime import Runtime
from npu_device.collectives.dtypes import mean_dtype
from npu_device.collectives.group import Group
from npu_device.collectives.tensorflow_backend import kernels, words

TRANSFER_BYTES = 64 << 20
"""About how much goes into one transfer of a broadcast: large enough for the full bandwidth, small enough not to double
a large model's memory.
"""

# Sums and products are cut back to the narrow dtype afterwards, which wraps around as they would by themselves.
_CARRIERS = {
    tf.int8: tf.int32,
    tf.int16: tf.int32,
    tf.uint8: tf.int32,
    tf.uint16: tf.int32,
    tf.uint32: tf.int64,
}

_Move = Callable[[tf.Tensor], tf.Tensor]


def start_all_reduce(
    runtime: Runtime, segments: Sequence[Sequence[tf.Tensor]], reduction: str, group: Group, wire: tf.DType | None
) -> list[Callable[[], list[tf.Tensor]]]:
    """As ``collectives.backend.start_all_reduce``. The collectives run side by side."""
    return [partial(_all_reduce_segment, runtime, segment, reduction, group, wire) for segment in segments]


def all_gather(runtime: Runtime, row: tf.Tensor, group: Group) -> tf.Tensor:
    """Everybody's row on every rank: [n] in, [group.size, n] out; n is the same on all ranks."""
    return _carried(row[tf.newaxis], lambda carrier: kernels.all_gather(runtime, carrier, group), group.size)


def all_to_all(runtime: Runtime, rows: tf.Tensor, group: Group) -> tf.Tensor:
    """Row i goes to rank i, and row i of the result comes from rank i: [group.size, n] in and out."""
    return _carried(rows, lambda carrier: kernels.all_to_all(runtime, carrier, group), group.size)


def reduce(runtime: Runtime, tensors: Sequence[tf.Tensor], reduction: str, root: int, group: Group) -> list[tf.Tensor]:
    """As ``shared_memory.backend.reduce``; to all, since TensorFlow has nothing else."""
    del root
    return _all_reduce_segment(runtime, tensors, reduction, group, None)


def broadcast(runtime: Runtime, tensors: Sequence[tf.Tensor], root: int, group: Group) -> list[tf.Tensor]:
    """The root's tensors on every rank, whose own have the same shapes and dtypes; in few large transfers."""
    results: list[tf.Tensor] = []
    for transfer in _transfers(tensors):
        received = _with_an_element(
            lambda vector: kernels.broadcast(runtime, vector, root, group), words.pack(transfer)
        )
        results.extend(words.unpack(received, transfer))
    return results


def receive(runtime: Runtime, like: tf.TensorSpec, root: int, group: Group) -> tf.Tensor:
    """What another rank broadcasts, whose shape and dtype this one knows."""
    elements = like.shape.num_elements()
    length = words.words_for(elements, like.dtype)
    vector = kernels.broadcast_receive(runtime, tf.constant([max(length, 1)]), tf.int32, group)[:length]
    return tf.reshape(words.from_words(vector[tf.newaxis], like.dtype, elements), like.shape)


def _all_reduce_segment(
    runtime: Runtime, tensors: Sequence[tf.Tensor], reduction: str, group: Group, wire: tf.DType | None
) -> list[tf.Tensor]:
    has_elements = any(tensor.shape.num_elements() for tensor in tensors)
    together = tensors[0] if len(tensors) == 1 else pack(tensors)
    reduced = _all_reduce_one(runtime, together, has_elements, reduction, group, wire)
    return [reduced] if len(tensors) == 1 else unpack(reduced, tensors)


def pack(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """The elements of tensors of one dtype, one after the other."""
    return tf.concat([tf.reshape(tensor, [-1]) for tensor in tensors], axis=0)


def unpack(elements: tf.Tensor, like: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """What ``pack`` put together, in tensors of the shapes of ``like``."""
    parts = tf.split(elements, [_count(tensor) for tensor in like])
    return [tf.reshape(part, _shape(tensor)) for part, tensor in zip(parts, like)]


def _count(tensor: tf.Tensor) -> int | tf.Tensor:
    known: int | None = tensor.shape.num_elements()
    return tf.size(tensor) if known is None else known


def _shape(tensor: tf.Tensor) -> tf.TensorShape | tf.Tensor:
    return tensor.shape if tensor.shape.is_fully_defined() else tf.shape(tensor)


def _all_reduce_one(
    runtime: Runtime, tensor: tf.Tensor, has_elements: bool, reduction: str, group: Group, wire: tf.DType | None
) -> tf.Tensor:
    merge = "sum" if reduction == "mean" else reduction

    def kernel(value: tf.Tensor) -> tf.Tensor:
        return kernels.all_reduce(runtime, value, merge, group)

    def reduce_native(value: tf.Tensor) -> tf.Tensor:
        return kernel(value) if has_elements else _with_an_element(kernel, value)

    dtype = tensor.dtype
    if wire is not None:
        # The mean's division comes first, so that 16 bits hold the sum as well as they hold one rank's values.
        share = tensor / group.size if reduction == "mean" else tensor
        return tf.cast(reduce_native(tf.cast(share, wire)), dtype)
    if dtype.is_floating:
        reduced = reduce_native(tensor)
        return reduced * tf.cast(1.0 / group.size, dtype) if reduction == "mean" else reduced
    if dtype == tf.uint64:
        reduced = _reduce_uint64(reduce_native, tensor, merge)
    else:
        reduced = reduce_native(tf.cast(tensor, _CARRIERS.get(dtype, dtype)))
    if reduction == "mean":
        return tf.cast(tf.cast(reduced, tf.float64) / group.size, mean_dtype(dtype))
    return tf.cast(reduced, dtype)


def _reduce_uint64(reduce_native: _Move, tensor: tf.Tensor, merge: str) -> tf.Tensor:
    """In int64, whose sums and products have the same bits, and whose order is the same with the top bit flipped."""
    flip = tf.int64.min if merge in ("min", "max") else 0
    reduced = reduce_native(tf.bitwise.bitwise_xor(tf.bitcast(tensor, tf.int64), tf.constant(flip, tf.int64)))
    return tf.bitcast(tf.bitwise.bitwise_xor(reduced, tf.constant(flip, tf.int64)), tf.uint64)


def _carried(rows: tf.Tensor, move: _Move, size: int) -> tf.Tensor:
    """Rows through a move, in a dtype and a number of elements that the kernels take."""
    native = rows.dtype in kernels.MOVE_DTYPES
    columns = rows.shape[1] if rows.shape[1] is not None else tf.shape(rows)[1]
    carrier = rows if native else words.to_words(rows)
    length = carrier.shape[1]
    if length:
        moved = move(carrier)
    else:
        length = tf.shape(carrier)[1]
        moved = move(tf.pad(carrier, [[0, 0], [0, tf.cast(length == 0, tf.int32)]]))[:, :length]
    result = moved if native else words.from_words(moved, rows.dtype, columns)
    result.set_shape([size, rows.shape[1]])
    return result


def _with_an_element(move: _Move, tensor: tf.Tensor) -> tf.Tensor:
    """``move(tensor)``, for a move that keeps the shape and must not get a tensor without elements: TensorFlow's
    kernels crash on those now and then (two reductions in one graph, TensorFlow 2.20), so that one element is sent.
    """
    if tensor.shape.num_elements():
        return move(tensor)
    elements = tf.size(tensor)
    moved = move(tf.pad(tf.reshape(tensor, [-1]), [[0, tf.cast(elements == 0, tf.int32)]]))
    result = tf.reshape(moved[:elements], tf.shape(tensor))
    result.set_shape(tensor.shape)
    return result


def _transfers(tensors: Sequence[tf.Tensor]) -> list[list[tf.Tensor]]:
    """Cut the list, in its order, into transfers of about ``TRANSFER_BYTES``. A tensor of unknown size goes alone."""
    transfers: list[list[tf.Tensor]] = []
    room = 0
    for tensor in tensors:
        count = words.count(tensor)
        size = count * 4 if isinstance(count, int) else TRANSFER_BYTES
        if not transfers or size > room:
            transfers.append([])
            room = TRANSFER_BYTES
        transfers[-1].append(tensor)
        room -= size
    return transfers
