"""barrier: no rank continues before all ranks of the group have come."""

from __future__ import annotations

import tensorflow as tf

from npu_device._src.collectives.all_reduce import all_reduce_segments
from npu_device._src.collectives.group import Group
from npu_device._src.collectives.operation import Declaration, collective
from npu_device._src.collectives.terms import Agreement


def _declare(group: Group) -> Declaration:
    return Declaration("barrier", group, [], lambda: tf.TensorSpec([], tf.int32))


@collective(_declare)
def barrier(agreement: Agreement, group: Group) -> tf.Tensor:
    """Wait until every rank of the group has made this call.

    Args:
        agreement: on this call; the caller passes the job.
        group: the group, of which this rank is a member.

    Returns:
        The number of ranks that came, int32 of shape []. In eager mode the wait is over when the call returns; in a
        ``tf.function`` it is over when this tensor exists, so make later operations depend on it
        (``tf.control_dependencies``).
    """
    [[ranks]] = all_reduce_segments(agreement, [[tf.constant(1)]], "sum", group, None)
    return ranks
