"""all_to_all_vc: like all_to_all_v, with all ranks' counts in one matrix that every rank knows."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from npu_device._src.collectives import blocks, moving, shapes
from npu_device._src.collectives.choice import row_length
from npu_device._src.collectives.dtypes import require_bits
from npu_device._src.collectives.group import Group
from npu_device._src.collectives.operation import Declaration, collective
from npu_device._src.collectives.terms import Agreement


def _declare(data: tf.Tensor, send_count_matrix: Any, group: Group) -> Declaration:
    shapes.require_vector("all_to_all_vc", data)
    require_bits(data.dtype)
    matrix = _matrix(send_count_matrix, group)
    outgoing = blocks.packed(matrix[group.rank])
    blocks.checked("send", outgoing.counts, outgoing.displacements, group.size, data.shape[0])
    known = tf.get_static_value(matrix)
    counts = "known to the running graph only" if known is None else known.tolist()
    return Declaration(
        "all_to_all_vc",
        group,
        [data],
        lambda: tf.TensorSpec([None], data.dtype),
        {"send_count_matrix": counts},
        ragged=True,
    )


@collective(_declare, "data", "send_count_matrix")
def all_to_all_vc(agreement: Agreement, data: tf.Tensor, send_count_matrix: Any, group: Group) -> tf.Tensor:
    """Exchange blocks of different lengths among all ranks.

    Args:
        agreement: on this call; the caller passes the running cluster.
        data: the blocks for rank 0, 1, … concatenated; shape [sum of this rank's row]; any numeric dtype or
            bool.
        send_count_matrix: elements that group rank i (row) sends to rank j (column); whole numbers, shape
            [group.size, group.size], the same on every rank.
        group: the group, of which this rank is a member.

    Returns:
        The blocks from rank 0, 1, … concatenated; shape [sum of this rank's column]. Its gradient is sent the
        other way.

    Raises:
        ValueError: ``data`` has more than one dimension or too few elements; a wrong shape of the matrix, negative
            numbers.
        TypeError: a dtype that has no bits to send.
        MismatchError: the matrices of the ranks differ.

    Each block is sent padded to the longest of all.
    """
    matrix = _matrix(send_count_matrix, group)
    longest = row_length(agreement.runtime, group, data.dtype, tf.reduce_max(matrix))
    outgoing = blocks.pad_blocks(data, blocks.packed(matrix[group.rank]), longest)
    return blocks.join(moving.exchange(agreement, outgoing, group), blocks.packed(matrix[:, group.rank]))


def _matrix(send_count_matrix: Any, group: Group) -> tf.Tensor:
    return blocks.whole_numbers("send_count_matrix", send_count_matrix, [group.size, group.size])
