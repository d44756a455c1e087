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
    """Exchange blocks of different lengths among all ranks; its gradient is sent the other way.

    The ranks compare their matrices, and each block is sent padded to the longest of all. For arguments, result and
    errors see ``training.hccl_ops.all_to_all_v_c``.
    """
    matrix = _matrix(send_count_matrix, group)
    longest = row_length(agreement.job, group, data.dtype, tf.reduce_max(matrix))
    outgoing = blocks.pad_blocks(data, blocks.packed(matrix[group.rank]), longest)
    return blocks.join(moving.exchange(agreement, outgoing, group), blocks.packed(matrix[:, group.rank]))


def _matrix(send_count_matrix: Any, group: Group) -> tf.Tensor:
    return blocks.whole_numbers("send_count_matrix", send_count_matrix, [group.size, group.size])
