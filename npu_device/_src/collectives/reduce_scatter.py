"""reduce_scatter: each rank gets its block of the result of all_reduce."""

from __future__ import annotations

import tensorflow as tf

from npu_device._src.collectives import moving, shapes
from npu_device._src.collectives.all_reduce import require_reduction
from npu_device._src.collectives.dtypes import reduced_dtype
from npu_device._src.collectives.folding import fold
from npu_device._src.collectives.group import Group
from npu_device._src.collectives.operation import Declaration, collective
from npu_device._src.collectives.terms import Agreement


def _declare(tensor: tf.Tensor, reduction: str, group: Group) -> Declaration:
    require_reduction("reduce_scatter", tensor.dtype, reduction)
    _require_blocks(tensor, group)

    def results() -> tf.TensorSpec:
        block = shapes.spec_with_first_dimension(tensor, lambda rows: rows // group.size)
        return tf.TensorSpec(block.shape, reduced_dtype(tensor.dtype, reduction))

    return Declaration("reduce_scatter", group, [tensor], results, {"reduction": reduction})


@collective(_declare, "tensor")
def reduce_scatter(agreement: Agreement, tensor: tf.Tensor, reduction: str, group: Group) -> tf.Tensor:
    """Reduce over a group, and give each rank its block of the first dimension: [n, …] in, [n / group.size, …] out.

    The mean of integers is floating-point, as in ``all_reduce``; on ranks that share memory it is bit by bit the block
    of ``all_reduce``. Differentiable. For arguments and errors see ``training.hccl_ops.reduce_scatter``.

    TensorFlow has no kernel for it on the CPU. The blocks are exchanged and each rank reduces its own, which moves half
    the bytes of an all_reduce.
    """
    blocks = moving.exchange(agreement, _in_blocks(tensor, group), group)
    reduced = fold(tf.unstack(blocks, num=group.size), reduction)
    return shapes.with_first_dimension(reduced, tensor, lambda rows: rows // group.size)


def _require_blocks(tensor: tf.Tensor, group: Group) -> None:
    """Raise ValueError if the first dimension can't be cut into one block for each rank, as far as it is known."""
    shapes.require_first_dimension("reduce_scatter", tensor)
    rows = tensor.shape[0] if tensor.shape.rank is not None else None
    if rows is not None and rows % group.size:
        raise ValueError(
            f"{_blocks_text(group)}; found {rows} in shape {tuple(tensor.shape)}. Pad the tensor to a multiple of "
            f"{group.size}."
        )


def _in_blocks(tensor: tf.Tensor, group: Group) -> tf.Tensor:
    """Return the tensor cut along its first dimension into one block for each rank: shape [group.size, elements of a
    block]. ``_require_blocks`` has checked static shapes; others raise InvalidArgumentError when the graph runs.
    """
    checks = []
    if tensor.shape.rank is None or tensor.shape[0] is None:
        found = tf.shape(tensor)[0]
        checks.append(tf.debugging.Assert(found % group.size == 0, [f"{_blocks_text(group)}; found", found]))
    with tf.control_dependencies(checks):
        return tf.reshape(tensor, [group.size, -1])


def _blocks_text(group: Group) -> str:
    return (
        f"reduce_scatter: the first dimension (dim0) must be a multiple of rank_size, the {group.size} ranks of "
        f"{group.name!r}"
    )
