"""all_to_all_v: each rank sends each other rank a block of its own length from a buffer, and chooses where the blocks
that it receives go.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from npu_device._src.collectives import blocks, moving, shapes
from npu_device._src.collectives.choice import row_length
from npu_device._src.collectives.dtypes import require_bits
from npu_device._src.collectives.group import Group
from npu_device._src.collectives.operation import Declaration, collective
from npu_device._src.collectives.terms import Agreement


def _declare(data: tf.Tensor, group: Group, **_: Any) -> Declaration:
    shapes.require_vector("all_to_all_v", data)
    require_bits(data.dtype)
    return Declaration("all_to_all_v", group, [data], lambda: tf.TensorSpec([None], data.dtype), ragged=True)


@collective(_declare, "data", "send_counts", "send_displacements", "recv_counts", "recv_displacements")
def all_to_all_v(
    agreement: Agreement,
    data: tf.Tensor,
    send_counts: Any,
    send_displacements: Any,
    recv_counts: Any,
    recv_displacements: Any,
    group: Group,
) -> tf.Tensor:
    """Exchange blocks of different lengths among all ranks.

    Args:
        agreement: on this call; the caller passes the running cluster.
        data: shape [n], where n may differ on each rank; any numeric dtype or bool.
        send_counts: elements for each group rank; whole numbers, shape [group.size].
        send_displacements: where each of these blocks begins in ``data``, in elements; shape [group.size].
        recv_counts: elements from each group rank; shape [group.size].
        recv_displacements: where each of these blocks goes in the result, in elements; shape [group.size].
        group: the group, of which this rank is a member.

    Returns:
        Shape [end of the last block], zeros where there is no block. Its gradient is sent the other way.

    Raises:
        ValueError: ``data`` has more than one dimension; negative numbers, the wrong number of them, blocks outside of
            ``data``, received blocks that overlap; a rank expects other numbers of elements than it is sent, which is
            an error on every rank (in a ``tf.function``: InvalidArgumentError).
        TypeError: a dtype that has no bits to send.

    The ranks exchange their counts first. Each block is sent padded to the longest of all.
    """
    size = group.size
    outgoing = blocks.checked("send", send_counts, send_displacements, size, data.shape[0])
    incoming = blocks.checked("recv", recv_counts, recv_displacements, size)
    mine = tf.concat([outgoing.counts, incoming.counts], axis=0)
    everybody = moving.gather(agreement, mine[tf.newaxis], group)
    sent, expected = everybody[:, :size], tf.transpose(everybody[:, size:])
    with tf.control_dependencies(_require_equal(sent, expected)):
        longest = row_length(agreement.runtime, group, data.dtype, tf.reduce_max(sent))
    rows = moving.exchange(agreement, blocks.pad_blocks(data, outgoing, longest), group)
    return blocks.join(rows, incoming)


def _require_equal(sent: tf.Tensor, expected: tf.Tensor) -> list[Any]:
    """Check that each rank is sent what it expects: row i, column j holds the elements from rank i to rank j."""
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
