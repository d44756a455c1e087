"""The collectives that only move data: all_gather and all_to_all, each with variants, send and receive.

They are made like ``ops``. All but send and receive consist of two moves of the engine, ``gather`` and
``exchange``, for any dtype and any number of elements. Both are differentiable; everything around them is TensorFlow's
own, and therefore differentiable as well.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Callable, NamedTuple, Optional

import numpy as np
import tensorflow as tf

from npu_device._src.collectives.agreed_engine import AgreedEngine
from npu_device._src.collectives.collective import Collective
from npu_device._src.collectives.dtypes import Count, require_bits
from npu_device._src.collectives.group import Group
from npu_device._src.collectives.job import Job

_TAGS = 1 << 61


def all_gather(job: Job, tensor: tf.Tensor, group: Group) -> tf.Tensor:
    """Gather tensors of one shape, [n, …], into [n * group.size, …], ordered by group rank and the same on every rank.

    The gradient is the sum of all ranks' incoming gradients of the part of this rank. For arguments and errors see
    ``hccl_ops.allgather``.
    """
    require_first_dimension("all_gather", tensor)
    require_bits(tensor.dtype)

    def body(engine: AgreedEngine, tensor: tf.Tensor) -> tf.Tensor:
        gathered = engine.gather(tf.reshape(tensor, [1, -1]))
        return with_first_dimension(gathered, tensor, lambda rows: rows * group.size)

    result_specs = partial(spec_with_first_dimension, tensor, lambda rows: rows * group.size)
    collective = Collective("all_gather", group, [tensor], body, result_specs=result_specs)
    return collective.run(job)


def all_gather_v(job: Job, tensor: tf.Tensor, group: Group, purpose: str = "") -> tf.Tensor:
    """Gather tensors, [n, …] into [sum of n, …], whose first dimension may differ among the ranks; see ``all_gather``.

    Each part is sent padded to the longest. ``purpose`` is what the tensors are for, so that unrelated calls aren't
    taken for one.
    """
    require_first_dimension("all_gather_v", tensor)
    require_bits(tensor.dtype)

    details = {}
    if purpose:
        details = {"purpose": purpose}
    collective = Collective(
        "all_gather_v",
        group,
        [tensor],
        gather_ragged,
        result_specs=partial(spec_with_first_dimension, tensor, lambda _: None),
        details=details,
        is_ragged=True,
    )
    return collective.run(job)


def all_to_all_v(
    job: Job,
    vector: tf.Tensor,
    send_counts: Any,
    send_at: Any,
    recv_counts: Any,
    recv_at: Any,
    group: Group,
) -> tf.Tensor:
    """Exchange blocks of different lengths among all ranks; its gradient is sent the other way.

    The ranks exchange their counts first, and each block is sent padded to the longest of all. In a ``tf.function``,
    counts that don't fit each other are an InvalidArgumentError. For arguments, result and errors see
    ``hccl_ops.all_to_all_v``.
    """
    _require_vector("all_to_all_v", vector)
    require_bits(vector.dtype)
    size = group.size

    def body(
        engine: AgreedEngine,
        vector: tf.Tensor,
        sends: Any,
        sends_at: Any,
        recvs: Any,
        recvs_at: Any,
    ) -> tf.Tensor:
        outgoing = checked_blocks("send", sends, sends_at, size, vector.shape[0])
        incoming = checked_blocks("recv", recvs, recvs_at, size)
        # Both kinds of counts travel together: one exchange more would cost as much as a small
        # call.
        counts = engine.gather(tf.concat([outgoing.counts, incoming.counts], axis=0)[tf.newaxis])
        sent = counts[:, :size]
        expected = tf.transpose(counts[:, size:])
        # The counts are compared before any block is sent, so that nothing arrives that doesn't fit.
        with tf.control_dependencies(_require_equal(sent, expected)):
            longest = engine.row_length(vector.dtype, tf.reduce_max(sent))
        rows = engine.exchange(pad_blocks(vector, outgoing, longest))
        return join_blocks(rows, incoming)

    inputs = [vector, send_counts, send_at, recv_counts, recv_at]
    result_specs = partial(tf.TensorSpec, [None], vector.dtype)
    collective = Collective(
        "all_to_all_v", group, [vector], body, inputs, result_specs, is_ragged=True
    )
    return collective.run(job)


def _require_equal(sent: tf.Tensor, expected: tf.Tensor) -> list:
    # In both matrices, row i and column j hold the number of elements from rank i to rank j.
    text = "all_to_all_v: what a rank sends to another (send_counts) is not what the other expects (recv_counts)"
    if not tf.executing_eagerly():
        is_equal = tf.reduce_all(sent == expected)
        details = [
            f"{text}. Rows are the senders, columns the receivers. Sent:",
            sent,
            "expected:",
            expected,
        ]
        # ``summarize``: TensorFlow would otherwise print only three numbers.
        return [tf.debugging.Assert(is_equal, details, summarize=-1)]
    differing = np.argwhere(sent.numpy() != expected.numpy())
    if len(differing):
        lines = [
            f"group rank {i} sends {sent[i, j]} to rank {j}, which expects {expected[i, j]}"
            for i, j in differing
        ]
        raise ValueError("\n  ".join([f"{text}:", *lines]))
    return []


def all_to_all_vc(job: Job, vector: tf.Tensor, send_count_matrix: Any, group: Group) -> tf.Tensor:
    """Do what ``all_to_all_v`` does, with all ranks' counts in one matrix that every rank knows.

    The ranks compare their matrices, and each block is sent padded to the longest of all. For arguments, result and
    errors see ``hccl_ops.all_to_all_v_c``.
    """
    _require_vector("all_to_all_vc", vector)
    require_bits(vector.dtype)
    matrix = whole_numbers("send_count_matrix", send_count_matrix, [group.size, group.size])
    static_counts = tf.get_static_value(matrix)

    result_specs = partial(tf.TensorSpec, [None], vector.dtype)
    # Every rank has the same matrix; of one that only the running graph knows, this isn't checked.
    counts = "known to the running graph only"
    if static_counts is not None:
        counts = static_counts.tolist()
    details = {"send_count_matrix": counts}
    inputs = [vector, matrix]
    collective = Collective(
        "all_to_all_vc", group, [vector], _exchange, inputs, result_specs, details, is_ragged=True
    )
    return collective.run(job)


def _exchange(engine: AgreedEngine, vector: tf.Tensor, matrix: tf.Tensor) -> tf.Tensor:
    """Exchange blocks that lie one after the other; rank i (row) sends so many elements to rank j (column)."""
    group = engine.group
    outgoing = checked_blocks(
        "send", *packed_blocks(matrix[group.rank]), group.size, vector.shape[0]
    )
    longest = engine.row_length(vector.dtype, tf.reduce_max(matrix))
    rows = engine.exchange(pad_blocks(vector, outgoing, longest))
    return join_blocks(rows, packed_blocks(matrix[:, group.rank]))


def all_to_all_rows(
    job: Job, tensor: tf.Tensor, splits: tf.Tensor, group: Group
) -> list[tf.Tensor]:
    """Exchange rows, as Horovod's ``alltoall`` does: the first ones go to rank 0, the next ones to rank 1, and so on.

    ``splits`` are the numbers of rows for each rank; the other ranks needn't know them. Returns the rows that all ranks
    send to this one, by rank, and how many each of them sends.
    """
    require_first_dimension("alltoall", tensor)
    require_bits(tensor.dtype)
    size = group.size

    def body(engine: AgreedEngine, tensor: tf.Tensor, splits: tf.Tensor) -> list[tf.Tensor]:
        matrix = engine.gather(tf.ensure_shape(splits, [size])[tf.newaxis])
        row_length = tf.reduce_prod(tf.shape(tensor, tf.int64)[1:])
        counts = whole_numbers("splits", matrix, [size, size]) * row_length
        received = matrix[:, group.rank]
        moved = _exchange(engine, tf.reshape(tensor, [-1]), counts)
        row_count = tf.reduce_sum(tf.cast(received, tf.int64))
        return [with_rows(moved, row_count, tensor), received]

    def result_specs() -> list[tf.TensorSpec]:
        rows = spec_with_first_dimension(tensor, lambda _: None)
        return [rows, tf.TensorSpec([size], splits.dtype)]

    inputs = [tensor, splits]
    collective = Collective("alltoall", group, [tensor], body, inputs, result_specs, is_ragged=True)
    return collective.run(job)


def send(job: Job, tensor: tf.Tensor, tag: int, destination: int, group: Group) -> Any:
    """Send a tensor to one other rank; return the operation in a graph, and None in eager mode.

    A graph uses the operation for control dependencies. Each tag is a separate queue, first in, first out. There is no
    gradient: nothing of a send comes back to this rank. For arguments, errors and deadlocks see
    ``hccl_ops.send``.
    """
    require_bits(tensor.dtype)
    pair = _pair_of(group, group.rank, destination, tag)

    def body(engine: AgreedEngine, tensor: tf.Tensor) -> Any:
        sent = engine.send(tensor)
        if tf.executing_eagerly():
            return None
        return sent.op

    collective = Collective("send and receive", pair, [tensor], body, details={"tag": tag})
    return collective.run(job)


def receive(
    job: Job, shape: Any, dtype: tf.DType, tag: int, source: int, group: Group
) -> tf.Tensor:
    """Receive the tensor that one other rank sends with the same tag; see ``hccl_ops.receive``."""
    spec = tf.TensorSpec(shape, dtype)
    require_bits(spec.dtype)
    if not spec.shape.is_fully_defined():
        raise ValueError(
            f"receive needs to know every dimension of the tensor; found shape {spec.shape}"
        )
    pair = _pair_of(group, source, group.rank, tag)

    def body(engine: AgreedEngine) -> tf.Tensor:
        return engine.receive(spec)

    collective = Collective(
        "send and receive", pair, [spec], body, (), lambda: spec, details={"tag": tag}
    )
    return collective.run(job)


def _pair_of(group: Group, source: int, destination: int, tag: int) -> Group:
    """Return the group of a send and its receive: the two ranks, with a queue for each tag and direction."""
    require_member("src_rank", source, group)
    require_member("dest_rank", destination, group)
    if source == destination:
        raise ValueError(
            f"group rank {source} of {group.name!r} can't exchange data with itself; expected another rank of 0 to "
            f"{group.size - 1}"
        )
    if not -_TAGS <= tag < _TAGS:
        raise ValueError(
            f"tag {tag} is too large; expected a whole number from {-_TAGS} to {_TAGS - 1}"
        )
    own_rank = group.ranks[group.rank]
    ranks = tuple(sorted((group.ranks[source], group.ranks[destination])))
    # Each direction has a queue of its own, so that two ranks can send to each other under one tag.
    tag = 2 * tag + (source < destination)
    return Group(
        f"{group.name}/{ranks[0]}-{ranks[1]}", ranks, ranks.index(own_rank), group.name, tag
    )


def gather_ragged(engine: AgreedEngine, tensor: tf.Tensor) -> tf.Tensor:
    """Return all ranks' tensors one after the other, [n, …] into [sum of n, …]; part of a call that is agreed on."""
    # All ranks together may have more elements than 32 bits count.
    own_shape = tf.shape(tensor, tf.int64)
    row_shape = own_shape[1:]
    # The numbers of rows travel first, since the engine needs one length for all ranks.
    all_rows = engine.gather(own_shape[tf.newaxis, :1])[:, 0]
    counts = all_rows * tf.reduce_prod(row_shape)
    flat = tf.reshape(tensor, [1, -1])
    longest = engine.row_length(tensor.dtype, tf.reduce_max(counts))
    padding = longest - tf.size(flat, tf.int64)
    gathered = engine.gather(tf.pad(flat, [[0, 0], [0, padding]]))
    runs = [gathered[rank, : counts[rank]] for rank in range(engine.group.size)]
    return with_rows(tf.concat(runs, axis=0), tf.reduce_sum(all_rows), tensor)


# Shapes: checks before anything is sent, and the first dimension of results


def require_member(argument: str, rank: int, group: Group) -> None:
    """Raise ValueError if a group has no such rank; ``argument`` names the argument."""
    if not 0 <= rank < group.size:
        raise ValueError(
            f"{argument} {rank} is not in group {group.name!r}; expected 0 to {group.size - 1}"
        )


def require_first_dimension(collective: str, tensor: tf.Tensor) -> None:
    if tensor.shape.rank == 0:
        raise ValueError(
            f"{collective} works along the first dimension and was given a scalar; give it shape [1]: "
            "tensor[tf.newaxis]"
        )


def rows_of(tensor: tf.Tensor) -> int | None:
    """Return the first dimension; None if only the running graph knows it."""
    # A shape that is wholly unknown has no dimensions.
    if tensor.shape.rank is None:
        return None
    # After ``disable_v2_behavior``, an unknown dimension is an object, and not None.
    return tf.compat.dimension_value(tensor.shape[0])


def spec_with_first_dimension(tensor: tf.Tensor, rows: Callable[[int], Any]) -> tf.TensorSpec:
    """Return the spec of a tensor with another first dimension, ``rows(the tensor's)``; None means any."""
    if tensor.shape.rank is None:
        return tf.TensorSpec(None, tensor.dtype)
    length, *row_shape = tensor.shape.as_list()
    if length is not None:
        length = rows(length)
    return tf.TensorSpec([length, *row_shape], tensor.dtype)


def with_first_dimension(
    flat: tf.Tensor, original: tf.Tensor, rows: Callable[[Count], Count]
) -> tf.Tensor:
    """Return the elements in the shape of the original, but for its first dimension, ``rows(the original one)``."""
    if original.shape.is_fully_defined():
        return tf.reshape(flat, [rows(original.shape[0]), *original.shape[1:]])
    dynamic = tf.shape(original, tf.int64)
    reshaped = with_rows(flat, rows(dynamic[0]), original)
    reshaped.set_shape(spec_with_first_dimension(original, rows).shape)
    return reshaped


def with_rows(flat: tf.Tensor, row_count: tf.Tensor, original: tf.Tensor) -> tf.Tensor:
    """Return the elements as so many rows, int64, of the shape of those of the original."""
    row_shape = tf.shape(original, tf.int64)[1:]
    rows = tf.reshape(flat, tf.concat([[row_count], row_shape], axis=0))
    rows.set_shape(spec_with_first_dimension(original, lambda _: None).shape)
    return rows


# Blocks of different lengths in a one-dimensional buffer, which are located, cut out and put together


def _require_vector(collective: str, vector: tf.Tensor) -> None:
    if vector.shape.rank not in (None, 1):
        raise ValueError(
            f"{collective} exchanges blocks of a one-dimensional buffer; found shape {vector.shape}. What to do: "
            "tf.reshape(data, [-1]), and counts and displacements in elements."
        )


class Blocks(NamedTuple):
    """One block per rank: its elements, and the first one's position in the buffer; int64, shape [number of blocks]."""

    counts: tf.Tensor
    displacements: tf.Tensor


def packed_blocks(counts: tf.Tensor) -> Blocks:
    """Return blocks that lie one after the other."""
    return Blocks(counts, tf.cumsum(counts, exclusive=True))


def checked_blocks(
    name: str, counts: Any, displacements: Any, size: int, length: Optional[int] = None
) -> Blocks:
    """Check and return the blocks that a caller describes, one per rank. TensorFlow refuses what is known only at run
    time. ``length`` is the buffer's, if known; None for a buffer that is made to fit: there, no blocks may overlap.
    """
    where = f"{name}_displacements"
    text = f"{name}_counts and {where}"
    blocks = Blocks(
        whole_numbers(f"{name}_counts", counts, [size]),
        whole_numbers(where, displacements, [size]),
    )
    counts, displacements = map(tf.get_static_value, blocks)
    if counts is None or displacements is None:
        return blocks
    # Sorted by their position in the buffer, so that two blocks that overlap follow each other.
    located = sorted(zip(map(int, displacements), map(int, counts), range(size)))
    end = 0
    last_rank = -1
    # An empty block takes no room, wherever it is.
    for start, count, rank in located:
        if count == 0:
            continue
        if length is not None and start + count > length:
            raise ValueError(
                f"{text}: the block of rank {rank} ends at element {start + count}, and there are {length}"
            )
        if length is None and start < end:
            raise ValueError(
                f"{text}: the blocks of rank {last_rank} and rank {rank} overlap at element {start}"
            )
        end = start + count
        last_rank = rank
    return blocks


def whole_numbers(name: str, counts: Any, shape: list[int]) -> tf.Tensor:
    """Return counts or displacements as int64, none of them negative."""
    tensor = tf.cast(tf.convert_to_tensor(counts), tf.int64)
    if not tensor.shape.is_compatible_with(shape):
        raise ValueError(
            f"{name} has shape {tensor.shape}; expected {tuple(shape)}, one number per rank of the group"
        )
    static = tf.get_static_value(tensor)
    if static is not None and (static < 0).any():
        raise ValueError(f"{name} must not be negative; found {static.tolist()}")
    return tf.ensure_shape(tensor, shape)


def pad_blocks(vector: tf.Tensor, blocks: Blocks, longest: tf.Tensor) -> tf.Tensor:
    """Return the blocks of a buffer as rows of equal length, padded with zeros: shape [number of blocks, longest]."""
    rows = []
    for count, start in zip(*map(tf.unstack, blocks)):
        block = tf.slice(vector, [start], [count])
        rows.append(tf.pad(block, [[0, longest - count]]))
    return tf.stack(rows)


def join_blocks(rows: tf.Tensor, blocks: Blocks) -> tf.Tensor:
    """Return the buffer made of rows: block i is the beginning of row i. Zeros where there is no block."""
    # Blocks without elements may have any displacement.
    starts = tf.where(blocks.counts == 0, tf.zeros_like(blocks.displacements), blocks.displacements)
    padded = []
    end = tf.constant(0, tf.int64)
    for rank in tf.unstack(tf.cast(tf.argsort(starts, stable=True), tf.int64)):
        count = blocks.counts[rank]
        is_empty = count == 0
        # If blocks overlap, the gap is negative, and tf.pad refuses it.
        gap = tf.where(is_empty, tf.constant(0, tf.int64), starts[rank] - end)
        block = tf.slice(rows, [rank, 0], [1, count])[0]
        padded.append(tf.pad(block, [[gap, 0]]))
        end = tf.where(is_empty, end, starts[rank] + count)
    return tf.concat(padded, axis=0)
