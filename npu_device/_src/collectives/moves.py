"""The collective operations that only move data: all_gather, all_gather_v, all_to_all_v, all_to_all_vc, send, receive.

They are made like those of ``ops``. All but send and receive consist of two moves, ``gather`` and ``exchange``, for any
dtype and any number of elements. Both are differentiable; everything around them is TensorFlow's own, and therefore
differentiable as well.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Callable

import numpy as np
import tensorflow as tf

from npu_device._src.collectives import shapes
from npu_device._src.collectives.call import Agreement
from npu_device._src.collectives.dtypes import require_bits
from npu_device._src.collectives.engines.host import transfers
from npu_device._src.collectives.graph import differentiable
from npu_device._src.collectives.group import Group
from npu_device._src.collectives.job import Job
from npu_device._src.collectives.operation import Operation, backend_of, row_length

_TAGS = 1 << 61


def all_gather(job: Job, tensor: tf.Tensor, group: Group) -> tf.Tensor:
    """Gather tensors of one shape, [n, …], into [n * group.size, …], ordered by group rank and the same on every rank.

    The gradient is the sum of all ranks' incoming gradients of the part of this rank. For arguments and errors see
    ``training.hccl_ops.allgather``.
    """
    shapes.require_first_dimension("all_gather", tensor)
    require_bits(tensor.dtype)

    def body(agreement: Agreement, tensor: tf.Tensor) -> tf.Tensor:
        gathered = gather(agreement, tf.reshape(tensor, [1, -1]), group)
        return shapes.with_first_dimension(gathered, tensor, lambda rows: rows * group.size)

    def results() -> tf.TensorSpec:
        return shapes.spec_with_first_dimension(tensor, lambda rows: rows * group.size)

    return Operation("all_gather", group, [tensor], body, results=results).run(job)


def all_gather_v(job: Job, tensor: tf.Tensor, group: Group, purpose: str = "") -> tf.Tensor:
    """Gather tensors, [n, …] into [sum of n, …], whose first dimension may differ among the ranks; see ``all_gather``.

    Each part is sent padded to the longest. ``purpose`` is what the tensors are for, so that unrelated calls aren't
    taken for one.
    """
    shapes.require_first_dimension("all_gather_v", tensor)
    require_bits(tensor.dtype)

    def body(agreement: Agreement, tensor: tf.Tensor) -> tf.Tensor:
        return gather_ragged(agreement, tensor, group)

    def results() -> tf.TensorSpec:
        return shapes.spec_with_first_dimension(tensor, lambda _: None)

    same = {"purpose": purpose} if purpose else {}
    return Operation("all_gather_v", group, [tensor], body, results=results, same=same, ragged=True).run(job)


def all_to_all_v(
    job: Job, data: tf.Tensor, send_counts: Any, send_at: Any, recv_counts: Any, recv_at: Any, group: Group
) -> tf.Tensor:
    """Exchange blocks of different lengths among all ranks; its gradient is sent the other way.

    The ranks exchange their counts first, and each block is sent padded to the longest of all. In a ``tf.function``,
    counts that don't fit each other are an InvalidArgumentError. For arguments, result and errors see
    ``training.hccl_ops.all_to_all_v``.
    """
    shapes.require_vector("all_to_all_v", data)
    require_bits(data.dtype)
    size = group.size

    def body(agreement: Agreement, data: tf.Tensor, sends: Any, sends_at: Any, recvs: Any, recvs_at: Any) -> tf.Tensor:
        outgoing = shapes.checked("send", sends, sends_at, size, data.shape[0])
        incoming = shapes.checked("recv", recvs, recvs_at, size)
        mine = tf.concat([outgoing.counts, incoming.counts], axis=0)
        everybody = gather(agreement, mine[tf.newaxis], group)
        sent, expected = everybody[:, :size], tf.transpose(everybody[:, size:])
        with tf.control_dependencies(_require_equal(sent, expected)):
            longest = row_length(agreement.job, group, data.dtype, tf.reduce_max(sent))
        rows = exchange(agreement, shapes.pad_blocks(data, outgoing, longest), group)
        return shapes.join(rows, incoming)

    inputs = [data, send_counts, send_at, recv_counts, recv_at]
    results = partial(tf.TensorSpec, [None], data.dtype)
    return Operation("all_to_all_v", group, [data], body, inputs, results, ragged=True).run(job)


def _require_equal(sent: tf.Tensor, expected: tf.Tensor) -> list[Any]:
    # Row i, column j: the elements from rank i to rank j.
    text = "all_to_all_v: what a rank sends to another (send_counts) is not what the other expects (recv_counts)"
    if not tf.executing_eagerly():
        same = tf.reduce_all(sent == expected)
        details = [f"{text}. Rows are the senders, columns the receivers. Sent:", sent, "expected:", expected]
        return [tf.debugging.Assert(same, details, summarize=-1)]
    differing = np.argwhere(sent.numpy() != expected.numpy())
    if len(differing):
        lines = [f"group rank {i} sends {sent[i, j]} to rank {j}, which expects {expected[i, j]}" for i, j in differing]
        raise ValueError("\n  ".join([f"{text}:", *lines]))
    return []


def all_to_all_vc(job: Job, data: tf.Tensor, send_count_matrix: Any, group: Group) -> tf.Tensor:
    """Do what ``all_to_all_v`` does, with all ranks' counts in one matrix that every rank knows.

    The ranks compare their matrices, and each block is sent padded to the longest of all. For arguments, result and
    errors see ``training.hccl_ops.all_to_all_v_c``.
    """
    shapes.require_vector("all_to_all_vc", data)
    require_bits(data.dtype)
    matrix = shapes.whole_numbers("send_count_matrix", send_count_matrix, [group.size, group.size])
    known = tf.get_static_value(matrix)

    def body(agreement: Agreement, data: tf.Tensor, matrix: tf.Tensor) -> tf.Tensor:
        outgoing = shapes.checked("send", *shapes.packed(matrix[group.rank]), group.size, data.shape[0])
        longest = row_length(agreement.job, group, data.dtype, tf.reduce_max(matrix))
        rows = exchange(agreement, shapes.pad_blocks(data, outgoing, longest), group)
        return shapes.join(rows, shapes.packed(matrix[:, group.rank]))

    results = partial(tf.TensorSpec, [None], data.dtype)
    same = {"send_count_matrix": "known to the running graph only" if known is None else known.tolist()}
    return Operation("all_to_all_vc", group, [data], body, [data, matrix], results, same, ragged=True).run(job)


def send(job: Job, tensor: tf.Tensor, tag: int, destination: int, group: Group) -> Any:
    """Send a tensor to one other rank; return the operation in a graph, and None in eager mode.

    A graph uses the operation for control dependencies. Each tag is a separate queue, first in, first out. There is no
    gradient: nothing of a send comes back to this rank. For arguments, errors and deadlocks see
    ``training.hccl_ops.send``.
    """
    require_bits(tensor.dtype)
    pair = _pair_of(group, group.rank, destination, tag)

    def body(agreement: Agreement, tensor: tf.Tensor) -> Any:
        sent = transfers.send(agreement, tensor, pair)
        return None if tf.executing_eagerly() else sent.op

    return Operation("send and receive", pair, [tensor], body, same={"tag": tag}).run(job)


def receive(job: Job, shape: Any, dtype: tf.DType, tag: int, source: int, group: Group) -> tf.Tensor:
    """Receive the tensor that one other rank sends with the same tag; see ``training.hccl_ops.receive``."""
    like = tf.TensorSpec(shape, dtype)
    require_bits(like.dtype)
    if not like.shape.is_fully_defined():
        raise ValueError(f"receive needs to know every dimension of the tensor; found shape {like.shape}")
    pair = _pair_of(group, source, group.rank, tag)

    def body(agreement: Agreement) -> tf.Tensor:
        return transfers.receive(agreement, like, pair)

    return Operation("send and receive", pair, [like], body, (), lambda: like, same={"tag": tag}).run(job)


def _pair_of(group: Group, source: int, destination: int, tag: int) -> Group:
    """Return the group of a send and its receive: the two ranks, with a queue for each tag and direction."""
    shapes.require_member("src_rank", source, group)
    shapes.require_member("dest_rank", destination, group)
    if source == destination:
        raise ValueError(
            f"group rank {source} of {group.name!r} can't exchange data with itself; expected another rank of 0 to "
            f"{group.size - 1}"
        )
    if not -_TAGS <= tag < _TAGS:
        raise ValueError(f"tag {tag} is too large; expected a whole number from {-_TAGS} to {_TAGS - 1}")
    me = group.ranks[group.rank]
    ranks = tuple(sorted((group.ranks[source], group.ranks[destination])))
    tag = 2 * tag + (source < destination)
    return Group(f"{group.name}/{ranks[0]}-{ranks[1]}", ranks, ranks.index(me), group.name, tag)


# Parts of operations on which the ranks have agreed


def gather(agreement: Agreement, row: tf.Tensor, group: Group) -> tf.Tensor:
    """Return all ranks' rows on every rank: [1, n] in, [group.size, n] out; n is the same on all ranks."""
    gathered = backend_of(agreement, group, row.dtype).all_gather(agreement, row[0], group)

    def backward(upstream: tf.Tensor) -> tf.Tensor:
        return tf.reduce_sum(exchange(Agreement(agreement.job), upstream, group), axis=0, keepdims=True)

    return differentiable_move(gathered, backward, row)


def gather_ragged(agreement: Agreement, tensor: tf.Tensor, group: Group) -> tf.Tensor:
    row_shape = tf.shape(tensor)[1:]
    all_rows = gather(agreement, tf.shape(tensor)[tf.newaxis, :1], group)[:, 0]
    counts = all_rows * tf.reduce_prod(row_shape)
    flat = tf.reshape(tensor, [1, -1])
    longest = row_length(agreement.job, group, tensor.dtype, tf.reduce_max(counts))
    padded = tf.pad(flat, [[0, 0], [0, longest - tf.shape(flat)[1]]])
    gathered = gather(agreement, padded, group)
    elements = tf.concat([gathered[rank, : counts[rank]] for rank in range(group.size)], axis=0)
    result = tf.reshape(elements, tf.concat([[tf.reduce_sum(all_rows)], row_shape], axis=0))
    result.set_shape([None, *tensor.shape[1:]] if tensor.shape.rank else None)
    return result


def exchange(agreement: Agreement, rows: tf.Tensor, group: Group) -> tf.Tensor:
    """Send row i to rank i, and return the row from rank i as row i: [group.size, n] in and out; n is the same on
    all ranks.
    """
    received = backend_of(agreement, group, rows.dtype).all_to_all(agreement, rows, group)
    return differentiable_move(received, lambda upstream: exchange(Agreement(agreement.job), upstream, group), rows)


def differentiable_move(moved: tf.Tensor, backward: Callable[[tf.Tensor], tf.Tensor], tensor: tf.Tensor) -> tf.Tensor:
    """Return ``moved`` with the gradient ``backward(incoming gradient)`` for ``tensor``, of which it was made. Integers
    and other discrete values have no gradient.
    """
    if not (tensor.dtype.is_floating or tensor.dtype.is_complex):
        return moved
    return differentiable([moved], lambda upstream: [backward(upstream)], [tensor])[0]
