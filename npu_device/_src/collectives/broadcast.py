"""broadcast: every rank gets the root's tensors."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from npu_device._src.collectives import shapes
from npu_device._src.collectives.choice import reducing_backend_of
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
    """Send the root's tensors to every rank of the group.

    Args:
        agreement: on this call; the caller passes the running cluster.
        tensors: of any shape and any numeric dtype or bool; the same shapes and dtypes on every rank.
        root_rank: the group rank whose values count.
        group: the group, of which this rank is a member.

    Returns:
        The root's values, in the order, shapes and dtypes of ``tensors``. Differentiable: the root's gradient is the
        sum of all ranks' incoming gradients, the others' is zero.

    Raises:
        ValueError: the root is not in the group.
        TypeError: a dtype that isn't made of bits of fixed size (strings, resources).
    """
    if not tensors:
        return []

    def backward(*upstream: tf.Tensor) -> list[tf.Tensor | None]:
        from npu_device._src.collectives.reduce import reduce  # each is the other's gradient

        return [
            reduce(agreement.runtime, value, "sum", root_rank, group) if floating else None
            for value, floating in zip(upstream, floats)
        ]

    def forward(*values: tf.Tensor) -> list[tf.Tensor]:
        return backend.broadcast(agreement, values, root_rank, group)

    backend = reducing_backend_of(agreement, group, tf.int32)
    floats = [tensor.dtype.is_floating for tensor in tensors]
    return differentiable(forward, backward, tensors)
