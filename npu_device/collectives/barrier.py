"""barrier: nobody goes on before all ranks of the group have come."""

from __future__ import annotations

import tensorflow as tf

from npu_device.cluster.runtime import Runtime
from npu_device.collectives import backend
from npu_device.collectives.agreement import collective
from npu_device.collectives.group import Group


@collective("barrier", None)
def barrier(runtime: Runtime, group: Group) -> tf.Tensor:
    """Wait until every rank of the group has made this call.

    Args:
        runtime: the running cluster.
        group: the group, of which this rank is a member.

    Returns:
        The number of ranks that came, int32 of shape []. In eager mode the wait is over when the call returns; in a
        ``tf.function`` it is over when this tensor exists, so that what must come afterwards depends on it
        (``tf.control_dependencies``).
    """
    return backend.all_reduce(runtime, tf.constant(1), "sum", group)
