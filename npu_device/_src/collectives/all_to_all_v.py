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
    """Exchange blocks of different lengths among all ranks; its gradient is sent the other way.

    The ranks exchange their counts first, and each block is sent padded to the longest of all. In a ``tf.function``,
    counts that don't fit each other are an InvalidArgumentError. For arguments, result and errors see
    ``training.hccl_ops.all_to_all_v``.
    """
    size = group.size
    outgoing = blocks.checked("send", send_counts, send_displacements, size, data.shape[0])
    incoming = blocks.checked("recv", recv_counts, recv_displacements, size)
    mine = tf.concat([outgoing.counts, incoming.counts], axis=0)
    everybody = moving.gather(agreement, mine[tf.newaxis], group)
    sent, expected = everybody[:, :size], tf.transpose(everybody[:, size:])
    with tf.control_dependencies(_require_equal(sent, expected)):
        longest = row_length(agreement.job, group, data.dtype, tf.reduce_max(sent))
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
