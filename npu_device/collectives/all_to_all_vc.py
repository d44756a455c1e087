"""all_to_all_vc: like all_to_all_v, with everybody's counts in one matrix that every rank knows."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from npu_device.cluster.runtime import Runtime
from npu_device.collectives import blocks, moving, shapes
from npu_device.collectives.agreement import agreed, describe
from npu_device.collectives.group import Group


def all_to_all_vc(runtime: Runtime, data: tf.Tensor, send_count_matrix: Any, group: Group) -> tf.Tensor:
    """Exchange blocks of different lengths among all ranks.

    Args:
        runtime: the running cluster.
        data: the blocks for rank 0, 1, … one after the other; shape [sum of this rank's row]; any numeric dtype or
            bool.
        send_count_matrix: elements that group rank i (row) sends to rank j (column); whole numbers, shape
            [group.size, group.size], the same on every rank.
        group: the group, of which this rank is a member.

    Returns:
        The blocks from rank 0, 1, … one after the other; shape [sum of this rank's column]. Its gradient travels the
        other way.

    Raises:
        ValueError: ``data`` has more than one dimension or too few elements; another shape of the matrix, negative
            numbers.
        TypeError: a dtype that has no bits to send.
        MismatchError: the matrices of the ranks differ.

    Each block travels padded to the longest of all.
    """
    shapes.require_vector("all_to_all_vc", data)
    matrix = blocks.whole_numbers("send_count_matrix", send_count_matrix, [group.size, group.size])
    outgoing = blocks.packed(matrix[group.rank])
    blocks.checked("send", outgoing.counts, outgoing.displacements, group.size, data.shape[0])
    known = tf.get_static_value(matrix)
    counts = "known to the running graph only" if known is None else known.tolist()
    call = describe("all_to_all_vc", [data], ragged=True, send_count_matrix=counts)
    with agreed(runtime, group, call, [data]):
        rows = moving.exchange(runtime, blocks.cut(data, outgoing, tf.reduce_max(matrix)), group)
        return blocks.join(rows, blocks.packed(matrix[:, group.rank]))
