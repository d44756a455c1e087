"""broadcast: every rank gets the root's tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from npu_device.cluster.runtime import Runtime
from npu_device.collectives import backend, shapes
from npu_device.collectives.agreement import agreed, describe
from npu_device.collectives.dtypes import require_bits
from npu_device.collectives.group import Group


def broadcast(runtime: Runtime, tensors: Sequence[tf.Tensor], root_rank: int, group: Group) -> list[tf.Tensor]:
    """Send the root's tensors to every rank of the group.

    Args:
        runtime: the running cluster.
        tensors: of any shape and any numeric dtype or bool; the same shapes and dtypes on every rank.
        root_rank: the group rank whose values count.
        group: the group, of which this rank is a member.

    Returns:
        The root's values, in the order, shapes and dtypes of ``tensors``. Differentiable: the root's gradient is the
        sum of everybody's incoming gradient, the others' is zero.

    Raises:
        ValueError: the root is not in the group.
        TypeError: a dtype that isn't made of bits of fixed size (strings, resources).
    """
    shapes.require_member("root_rank", root_rank, group)
    for tensor in tensors:
        require_bits(tensor.dtype)
    if not tensors:
        return []

    def backward(*upstream: tf.Tensor) -> list[tf.Tensor | None]:
        from npu_device.collectives.reduce import reduce  # each is the other's gradient

        return [
            reduce(runtime, value, "sum", root_rank, group) if tensor.dtype.is_floating else None
            for value, tensor in zip(upstream, tensors)
        ]

    @tf.custom_gradient
    def differentiable(*values: tf.Tensor) -> tuple[list[tf.Tensor], Any]:
        return backend.broadcast(runtime, values, root_rank, group), backward

    with agreed(runtime, group, describe("broadcast", tensors, root_rank=root_rank), tensors):
        return list(differentiable(*tensors))
