"""What an engine offers, composed of TensorFlow's kernels: lists, every dtype, any number of elements.

TensorFlow's kernels support few dtypes, and crash the process on tensors without elements (seen with TensorFlow 2.20).
Narrow integers are reduced as wider ones, data that is only moved is sent as 32-bit words, and never without elements.
Their ring adds in the dtype that is sent, for which 16-bit floats are too narrow: those are exchanged, each rank
adds its block in float32, and the blocks are gathered. That moves as many bytes as a ring.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Callable

import numpy as np
import tensorflow as tf

from npu_device._src.collectives import dtypes
from npu_device._src.collectives.call import AGREED, Terms
from npu_device._src.collectives.dtypes import (
    Count,
    TensorList,
    Tensors,
    TensorsOrSpecs,
    Wire,
    fold,
    sum_dtype,
)
from npu_device._src.collectives.engines.context import EngineContext
from npu_device._src.collectives.engines.tensorflow.kernels import MOVE_DTYPES, Kernels
from npu_device._src.collectives.graph import call_now
from npu_device._src.collectives.group import Group, counts_of

# A broadcast is cut into transfers of about this size: enough for the full bandwidth, and not so many bytes as to
# double a large model's memory.
TRANSFER_BYTES = 64 << 20

# Sums and products are cast back to the narrow dtype afterwards, which wraps around just as the narrow dtype would.
_CARRIERS = {
    **dict.fromkeys((tf.int8, tf.int16, tf.uint8, tf.uint16), tf.int32),
    tf.uint32: tf.int64,
}

_Move = Callable[[tf.Tensor], tf.Tensor]


class TensorFlowEngine:
    """TensorFlow's collectives; see ``HostEngine``. The ranks have agreed on a call before."""

    def __init__(self, context: EngineContext) -> None:
        self._context = context
        self.kernels = Kernels(context)
        self.transfer_bytes = TRANSFER_BYTES

    def all_reduce(
        self,
        segments: Sequence[Tensors],
        reduction: str,
        group: Group,
        wire: Wire,
        terms: Terms = AGREED,
        root: int | None = None,
    ) -> list[TensorList]:
        """Reduce segments to all ranks: TensorFlow has nothing else for a root."""
        return [self._all_reduce_segment(segment, reduction, group, wire) for segment in segments]

    def all_gather(self, row: tf.Tensor, group: Group, terms: Terms = AGREED) -> tf.Tensor:
        return _carried(
            row[tf.newaxis], lambda carrier: self.kernels.all_gather(carrier, group), group.size
        )

    def all_to_all(self, rows: tf.Tensor, group: Group, terms: Terms = AGREED) -> tf.Tensor:
        return _carried(rows, lambda carrier: self.kernels.all_to_all(carrier, group), group.size)

    def broadcast(
        self, tensors: TensorsOrSpecs, owners: Sequence[int], group: Group, terms: Terms = AGREED
    ) -> TensorList:
        """Return all tensors on every rank, those of one owner after the other, in few large transfers."""
        results = list(tensors)
        for owner in sorted(set(owners)):
            positions = [position for position, member in enumerate(owners) if member == owner]
            kernel = functools.partial(self.kernels.broadcast, root_rank=owner, group=group)
            move = functools.partial(_with_an_element, kernel)
            own_tensors = [_tensor(tensors[position]) for position in positions]
            received = _moved(own_tensors, move, self.transfer_bytes)
            for position, tensor in zip(positions, received):
                results[position] = tensor
        return results

    def _all_reduce_segment(
        self, tensors: Tensors, reduction: str, group: Group, wire: Wire
    ) -> TensorList:
        shape = tensors[0].shape
        # A vector needs no other shape, which saves two operations in eager mode.
        if len(tensors) == 1 and shape.rank == 1 and shape.num_elements():
            return [self._all_reduce_vector(tensors[0], reduction, group, wire)]
        # The kernels take one tensor, so the segment travels as one. A single tensor is flat, too: TensorFlow compares
        # the shapes, and another rank may have a graph that doesn't know how many dimensions there are.
        pieces = [tf.reshape(tensor, [-1]) for tensor in tensors]
        if len(pieces) == 1:
            pieces = [self._all_reduce_vector(pieces[0], reduction, group, wire)]
        else:
            reduced = self._all_reduce_vector(tf.concat(pieces, axis=0), reduction, group, wire)
            pieces = tf.split(reduced, list(map(_count, tensors)))
        return [tf.reshape(piece, _shape(tensor)) for piece, tensor in zip(pieces, tensors)]

    def _all_reduce_vector(
        self, tensor: tf.Tensor, reduction: str, group: Group, wire: Wire
    ) -> tf.Tensor:
        merge = reduction
        if reduction == "mean":
            tensor = tf.cast(tensor, dtypes.mean_dtype(tensor.dtype))
            merge = "sum"
        kernel = functools.partial(self.kernels.all_reduce, reduction=merge, group=group)
        reduce_native = functools.partial(_with_an_element, kernel)
        dtype = tensor.dtype
        sent_dtype = dtypes.wire_dtype(dtype, wire)
        carrier = _CARRIERS.get(dtype, dtype)
        if merge in ("sum", "prod") and sum_dtype(sent_dtype) != sent_dtype:
            carrier = sum_dtype(dtype)
            # NCCL is fast enough for 32 bits, and has no exchange of rows.
            if not self._context.hosts.uses_nccl(carrier):
                return self._reduce_narrow(tensor, sent_dtype, reduction, group)
        if dtype == tf.uint64:
            reduced = _reduce_uint64(reduce_native, tensor, merge)
        else:
            reduced = reduce_native(tf.cast(tensor, carrier))
        if reduction == "mean":
            reduced = reduced / sum(counts_of(group))
        return tf.cast(reduced, dtype)

    def _reduce_narrow(
        self, tensor: tf.Tensor, wire: tf.DType, reduction: str, group: Group
    ) -> tf.Tensor:
        """Return the sum, mean or product of values sent in 16 bits and combined in float32 (float64 stays float64)."""
        wide = sum_dtype(tensor.dtype)
        size = group.size
        counts = counts_of(group)
        shares, scale = dtypes.wire_scales(reduction, counts)
        if tensor.dtype != wide:
            # A result of 16 bits overflows like the sum, so that no scale is needed.
            scale = 1
        divisor = scale
        fold_reduction = "sum"
        if reduction == "mean":
            divisor = sum(counts)
        elif reduction == "prod":
            fold_reduction = "prod"

        def narrow(values: tf.Tensor, divisor: int) -> tf.Tensor:
            if divisor != 1:
                values = values / divisor
            # The kernels move float16, so that bfloat16 travels as its bits.
            return tf.bitcast(tf.cast(values, wire), tf.float16)

        def widen(values: tf.Tensor, factor: int) -> tf.Tensor:
            wider = tf.cast(tf.bitcast(values, wire), wide)
            if factor == 1:
                return wider
            return wider * factor

        count = _count(tensor)
        # Every rank reduces a block, so the number of elements must be a multiple of the ranks.
        padded = tf.pad(narrow(tensor, shares[group.rank]), [[0, -count % size]])
        received = self.all_to_all(tf.reshape(padded, [size, -1]), group)
        received = tf.unstack(received, num=size)
        rows = [widen(row, share) for row, share in zip(received, shares)]
        block = narrow(fold(rows, fold_reduction), divisor)
        gathered = tf.reshape(self.all_gather(block, group), [-1])[:count]
        return tf.cast(widen(gathered, scale), tensor.dtype)


def _tensor(tensor: tf.Tensor | tf.TensorSpec) -> tf.Tensor:
    """Return a tensor of the spec of one that another rank owns: only the owner's values count."""
    if isinstance(tensor, tf.TensorSpec):
        return tf.zeros(tensor.shape, tensor.dtype)
    return tensor


def _count(tensor: tf.Tensor) -> int | tf.Tensor:
    count: int | None = tensor.shape.num_elements()
    if count is None:
        return tf.size(tensor)
    return count


def _shape(tensor: tf.Tensor) -> tf.TensorShape | tf.Tensor:
    if tensor.shape.is_fully_defined():
        return tensor.shape
    return tf.shape(tensor)


def _reduce_uint64(reduce_native: _Move, tensor: tf.Tensor, merge: str) -> tf.Tensor:
    """Reduce in int64: its sums and products have the same bits, and its order is the same with the top bit flipped."""
    flip = tf.constant(tf.int64.min if merge in ("min", "max") else 0, tf.int64)
    reduced = reduce_native(tf.bitwise.bitwise_xor(tf.bitcast(tensor, tf.int64), flip))
    return tf.bitcast(tf.bitwise.bitwise_xor(reduced, flip), tf.uint64)


def _carried(rows: tf.Tensor, move: _Move, size: int) -> tf.Tensor:
    """Send rows through a move, in a dtype that the kernels support."""
    if rows.dtype in MOVE_DTYPES:
        moved = _with_an_element(move, rows)
    else:
        words = _with_an_element(move, to_words(rows))
        moved = from_words(words, rows.dtype, _columns(rows))
    moved.set_shape([size, rows.shape[1]])
    return moved


def _with_an_element(move: _Move, tensor: tf.Tensor) -> tf.Tensor:
    """Return ``move(tensor)`` for a move of a vector or of rows that keeps their length, sending one element for an
    empty one: TensorFlow's kernels sometimes crash on those (two reductions in one graph, TensorFlow 2.20). Can go when
    they don't.
    """
    if tensor.shape.num_elements():
        return move(tensor)
    length = tf.shape(tensor)[-1]
    # The graph decides on the padding, because a shape that isn't static may turn out empty.
    padding = [[0, 0]] * (tensor.shape.rank - 1) + [[0, tf.cast(length == 0, tf.int32)]]
    return move(tf.pad(tensor, padding))[..., :length]


# Lists of tensors, in transfers of about ``TRANSFER_BYTES``: the same ones on every rank, also on a rank that knows
# some sizes only when its graph runs.


def _moved(tensors: Tensors, move: _Move, limit: int) -> TensorList:
    """Return tensors, of any dtypes, sent through a move of a vector in few large transfers, in order; ``limit``: bytes
    of a transfer of several tensors.
    """
    counts = list(map(words_of, tensors))
    if len(tensors) == 1:
        # It is one transfer, whatever its size.
        ends = [1]
    elif all(isinstance(count, int) for count in counts):
        ends = _ends_of_transfers(counts, limit)
    else:
        words = _moved_in_parts(pack_words(tensors), counts, move, limit)
        return unpack_words(words, tensors)
    results: TensorList = []
    for end in ends:
        transfer = tensors[len(results) : end]
        results += unpack_words(move(pack_words(transfer)), transfer)
    return results


def _ends_of_transfers(counts: Sequence[int], limit: int) -> list[int]:
    """Return for each transfer how many of the tensors, of these numbers of words, have then been sent."""
    ends: list[int] = []
    free = 0
    for position, count in enumerate(counts):
        size = count * 4
        if not ends or size > free:
            ends.append(position)
            free = limit
        ends[-1] = position + 1
        free -= size
    return ends


def _moved_in_parts(
    words: tf.Tensor, counts: Sequence[Count], move: _Move, limit: int
) -> tf.Tensor:
    """Return a vector of tensors, of these numbers of words, sent through a move in one part for each transfer.

    TensorFlow's collectives match only in the same iteration of the same loop (TensorFlow 2.20), and ranks that know
    the sizes need no loop. So there is a branch for each part that there could be.
    """
    specs = [tf.TensorSpec([], tf.int64), tf.TensorSpec([len(counts)], tf.int64)]
    number_of_parts, ends = call_now(functools.partial(_ends_in_words, limit), [counts], specs)
    bounds = tf.unstack(ends)
    parts = [move(words[: bounds[0]])]
    for position in range(1, len(bounds)):
        part = words[bounds[position - 1] : bounds[position]]
        is_sent = position < number_of_parts
        moved = tf.cond(
            is_sent, functools.partial(move, part), functools.partial(tf.identity, part)
        )
        parts.append(moved)
    return tf.concat(parts, axis=0)


def _ends_in_words(limit: int, counts: np.ndarray) -> list[np.ndarray]:
    """Return the number of transfers, and the number of words sent after each of them, as often as there are tensors:
    transfers that there aren't send nothing.
    """
    totals = np.cumsum(counts, dtype=np.int64)
    ends = _ends_of_transfers(counts.tolist(), limit)
    padded = ends + [len(counts)] * (len(counts) - len(ends))
    return [np.array(len(ends)), totals[np.array(padded) - 1]]


# Tensors of any dtype as vectors of 32-bit words, bit by bit, for data that is only moved. A narrow dtype takes its own
# number of bytes on the wire, rounded up to whole words.


def words_of(tensor: tf.Tensor) -> Count:
    """Return how many words a tensor takes; an int if its shape is statically known."""
    dtypes.require_bits(tensor.dtype)
    count = _count(tensor)
    size = tensor.dtype.size
    if size < 4:
        return -(-count // (4 // size))
    return count * (size // 4)


def pack_words(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Return all tensors in one int32 vector, each starting at a whole word."""
    words = [to_words(tf.reshape(tensor, [1, -1]))[0] for tensor in tensors]
    return tf.concat(words, axis=0)


def unpack_words(vector: tf.Tensor, originals: Sequence[tf.Tensor]) -> TensorList:
    """Reverse ``pack_words``; with the shapes and dtypes of the originals."""
    tensors = []
    lengths = list(map(words_of, originals))
    for words, tensor in zip(tf.split(vector, lengths, num=len(originals)), originals):
        flat = from_words(words[tf.newaxis], tensor.dtype, _count(tensor))
        tensors.append(tf.ensure_shape(tf.reshape(flat, _shape(tensor)), tensor.shape))
    return tensors


def to_words(rows: tf.Tensor) -> tf.Tensor:
    """Convert shape [k, n] of any dtype to int32 of shape [k, words for n], each row starting at a whole word."""
    if rows.dtype.is_bool:
        rows = tf.cast(rows, tf.uint8)
    count = tf.shape(rows)[0]
    size = rows.dtype.size
    if size < 4:
        per_word = 4 // size
        padded = tf.pad(rows, [[0, 0], [0, -_columns(rows) % per_word]])
        rows = tf.reshape(padded, [count, -1, per_word])
    words = tf.bitcast(rows, tf.int32)
    if size > 4:
        return tf.reshape(words, [count, -1])
    return words


def from_words(words: tf.Tensor, dtype: tf.DType, columns: Count) -> tf.Tensor:
    """Reverse ``to_words``: convert int32 of shape [k, words] to ``dtype`` of shape [k, columns]."""
    if dtype.is_bool:
        return tf.cast(from_words(words, tf.uint8, columns), tf.bool)
    count = tf.shape(words)[0]
    if dtype.size > 4:
        words = tf.reshape(words, [count, columns, dtype.size // 4])
    numbers = tf.bitcast(words, dtype)
    if dtype.size < 4:
        return tf.reshape(numbers, [count, -1])[:, :columns]
    return numbers


def _columns(rows: tf.Tensor) -> Count:
    if rows.shape[1] is None:
        return tf.shape(rows)[1]
    return rows.shape[1]


@functools.cache
def _lengths(dtype: tf.DType) -> np.ndarray:
    # Rows of different lengths are padded to few, since TensorFlow keeps something for each one forever: powers of two
    # up to 4,096, below which a transfer takes about the same time, then eight for each power.
    lengths = [0, *(1 << power for power in range(13))]
    for power in range(9, 59):
        lengths += [(8 + eighths) << power for eighths in range(1, 9)]
    lengths = [length for length in lengths if length < dtype.max]
    return np.array([*lengths, dtype.max], dtype.as_numpy_dtype)


def rounded(length: tf.Tensor) -> tf.Tensor:
    """Return the next of these lengths: int32 or int64, shape [], not below the given one."""
    table = tf.constant(_lengths(length.dtype))
    return table[tf.searchsorted(table, length[tf.newaxis])[0]]
