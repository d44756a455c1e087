"""broadcast: every rank gets the root's tensors."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from npu_device._src.collectives import shapes
from npu_device._src.collectives.choice import through_reducing_backend
from npu_device._src.collectives.differentiable import differentiable
from npu_device._src.collectives.dtypes import require_bits
from npu_device._src.collectives.group import Group
from npu_device._src.collectives.operation import Declaration, collective
from npu_device._src.collectives.terms import Agreement


def _declare(tensors: Sequence[tf.Tensor], root_rank: int, group: Group) -> Declaration | None:
    shapes.require_member("root_rank", root_rank, group)
    for tensor in tensors:
        require_bits(tensor.dtype)
    if not tensors:
        return None

    def results() -> list[tf.TensorSpec]:
        return [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in tensors]

    return Declaration("broadcast", group, tensors, results, {"root_rank": root_rank})


@collective(_declare, "tensors")
def broadcast(agreement: Agreement, tensors: Sequence[tf.Tensor], root_rank: int, group: Group) -> list[tf.Tensor]:
    """Send the root's tensors to every rank of the group; return them in the order of ``tensors``.

    Differentiable: the root's gradient is the sum of all ranks' incoming gradients, the others' is zero. For arguments
    and errors see ``training.hccl_ops.broadcast``.
    """
    if not tensors:
        return []

    def backward(*upstream: tf.Tensor) -> list[tf.Tensor | None]:
        from npu_device._src.collectives.reduce import reduce  # each is the other's gradient

        return [
            reduce(agreement.job, value, "sum", root_rank, group) if floating else None
            for value, floating in zip(upstream, floats)
        ]

    sent = through_reducing_backend(
        agreement, group, tf.int32, lambda backend, now: backend.broadcast(now, tensors, root_rank, group)
    )
    floats = [tensor.dtype.is_floating for tensor in tensors]
    return differentiable(sent, backward, tensors)
