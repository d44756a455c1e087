"""Checks of shapes and ranks before anything is sent, and helpers that restore the first dimension."""

from __future__ import annotations

from typing import Any, Callable, Union

import tensorflow as tf

from npu_device._src.collectives.group import Group

Count = Union[int, tf.Tensor]  # a number that is known while tracing, or an int32 scalar


def require_member(what: str, rank: int, group: Group) -> None:
    """Check a group rank that the caller names.

    Raises:
        ValueError: the group has no such rank.
    """
    if not 0 <= rank < group.size:
        raise ValueError(f"{what} {rank} is not in group {group.name!r}; expected 0 to {group.size - 1}")


def require_first_dimension(operation: str, tensor: tf.Tensor) -> None:
    """Check that there is a first dimension to cut or join along.

    Raises:
        ValueError: a scalar.
    """
    if tensor.shape.rank == 0:
        raise ValueError(
            f"{operation} works along the first dimension and was given a scalar; give it shape [1]: tensor[tf.newaxis]"
        )


def require_blocks(operation: str, tensor: tf.Tensor, group: Group) -> None:
    """Check that the first dimension can be cut into one block for each rank, as far as it is known.

    Raises:
        ValueError: a scalar, or the first dimension can't be divided.
    """
    require_first_dimension(operation, tensor)
    rows = tensor.shape[0] if tensor.shape.rank is not None else None
    if rows is not None and rows % group.size:
        raise ValueError(
            f"{_blocks_text(operation, group)}; found {rows} in shape {tuple(tensor.shape)}. Pad the tensor to a "
            f"multiple of {group.size}."
        )


def in_blocks(operation: str, tensor: tf.Tensor, group: Group) -> tf.Tensor:
    """Return the tensor cut along its first dimension into one block for each rank: shape [group.size, elements of a
    block]. ``require_blocks`` has checked static shapes; others raise InvalidArgumentError when the graph runs.
    """
    checks = []
    if tensor.shape.rank is None or tensor.shape[0] is None:
        found = tf.shape(tensor)[0]
        text = f"{_blocks_text(operation, group)}; found"
        checks.append(tf.debugging.Assert(found % group.size == 0, [text, found]))
    with tf.control_dependencies(checks):
        return tf.reshape(tensor, [group.size, -1])


def _blocks_text(operation: str, group: Group) -> str:
    return (
        f"{operation}: the first dimension (dim0) must be a multiple of rank_size, the {group.size} ranks of "
        f"{group.name!r}"
    )


def spec_with_first_dimension(tensor: tf.Tensor, rows: Callable[[int], Any]) -> tf.TensorSpec:
    """Return the spec of a tensor with another first dimension, ``rows(the tensor's)``; None means any."""
    if tensor.shape.rank is None:
        return tf.TensorSpec(None, tensor.dtype)
    first, *others = tensor.shape.as_list()
    return tf.TensorSpec([None if first is None else rows(first), *others], tensor.dtype)


def with_first_dimension(elements: tf.Tensor, like: tf.Tensor, rows: Callable[[Count], Count]) -> tf.Tensor:
    """Return the elements in the shape of ``like`` with another first dimension, ``rows(like's)``."""
    if like.shape.is_fully_defined():
        return tf.reshape(elements, [rows(like.shape[0]), *like.shape[1:]])
    dynamic = tf.shape(like)
    result = tf.reshape(elements, tf.concat([[rows(dynamic[0])], dynamic[1:]], axis=0))
    result.set_shape(spec_with_first_dimension(like, rows).shape)
    return result


def require_vector(operation: str, data: tf.Tensor) -> None:
    """Check that a buffer has one dimension.

    Raises:
        ValueError: it doesn't have one dimension.
    """
    if data.shape.rank not in (None, 1):
        raise ValueError(
            f"{operation} exchanges blocks of a one-dimensional buffer; found shape {data.shape}. What to do: "
            "tf.reshape(data, [-1]), and counts and displacements in elements."
        )
