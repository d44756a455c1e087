"""What the collectives ask of shapes and ranks before anything is sent, and how they put the first dimension back."""

from __future__ import annotations

from typing import Callable, Union

import tensorflow as tf

from npu_device.collectives.group import Group

Count = Union[int, tf.Tensor]  # a number that is known while tracing, or an int32 scalar


def require_member(what: str, rank: int, group: Group) -> None:
    """Check a group rank that the caller names.

    Raises:
        ValueError: no such rank in the group.
    """
    if not 0 <= rank < group.size:
        raise ValueError(f"{what} {rank} is not in group {group.name!r}; expected 0 to {group.size - 1}")


def require_first_dimension(operation: str, tensor: tf.Tensor) -> None:
    """Check that there is a dimension along which to cut or to join.

    Raises:
        ValueError: a scalar.
    """
    if tensor.shape.rank == 0:
        raise ValueError(
            f"{operation} works along the first dimension and was given a scalar; give it shape [1]: tensor[tf.newaxis]"
        )


def in_blocks(operation: str, tensor: tf.Tensor, group: Group) -> tf.Tensor:
    """The tensor cut along its first dimension into one block a rank: shape [group.size, elements of a block].

    Raises:
        ValueError: a scalar, or the first dimension can't be divided. Where it is known at run time only,
            InvalidArgumentError.
    """
    require_first_dimension(operation, tensor)
    size = group.size
    text = (
        f"{operation}: the first dimension (dim0) must be a multiple of rank_size, the {size} ranks of {group.name!r}"
    )
    rows = tensor.shape[0] if tensor.shape.rank is not None else None
    if rows is None:
        found = tf.shape(tensor)[0]
        check = tf.debugging.Assert(found % size == 0, [f"{text}; found", found])
        with tf.control_dependencies([check]):
            return tf.reshape(tensor, [size, -1])
    if rows % size:
        raise ValueError(
            f"{text}; found {rows} in shape {tuple(tensor.shape)}. Pad the tensor to a multiple of {size}."
        )
    return tf.reshape(tensor, [size, -1])


def with_first_dimension(elements: tf.Tensor, like: tf.Tensor, rows: Callable[[Count], Count]) -> tf.Tensor:
    """Elements in the shape of ``like`` with another first dimension, ``rows(like's)``."""
    if like.shape.is_fully_defined():
        return tf.reshape(elements, [rows(like.shape[0]), *like.shape[1:]])
    dynamic = tf.shape(like)
    result = tf.reshape(elements, tf.concat([[rows(dynamic[0])], dynamic[1:]], axis=0))
    if like.shape.rank is not None:
        result.set_shape([None if like.shape[0] is None else rows(like.shape[0]), *like.shape[1:]])
    return result


def require_vector(operation: str, data: tf.Tensor) -> None:
    """Check that a buffer has one dimension.

    Raises:
        ValueError: it has another number.
    """
    if data.shape.rank not in (None, 1):
        raise ValueError(
            f"{operation} exchanges blocks of a one-dimensional buffer; found shape {data.shape}. What to do: "
            "tf.reshape(data, [-1]), and counts and displacements in elements."
        )
