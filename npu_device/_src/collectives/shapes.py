"""Checks of shapes and ranks before anything is sent, and helpers that restore the first dimension."""

from __future__ import annotations

from typing import Any, Callable, Union

import tensorflow as tf

from npu_device._src.collectives.group import Group

Count = Union[int, tf.Tensor]  # a number that is known while tracing, or an int32 scalar


def require_member(what: str, rank: int, group: Group) -> None:
    """Raise ValueError if a group has no such rank; ``what`` names the argument."""
    if not 0 <= rank < group.size:
        raise ValueError(f"{what} {rank} is not in group {group.name!r}; expected 0 to {group.size - 1}")


def require_first_dimension(operation: str, tensor: tf.Tensor) -> None:
    """Raise ValueError for a scalar, which has no first dimension to cut or join along."""
    if tensor.shape.rank == 0:
        raise ValueError(
            f"{operation} works along the first dimension and was given a scalar; give it shape [1]: tensor[tf.newaxis]"
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
    """Raise ValueError if a buffer isn't one-dimensional."""
    if data.shape.rank not in (None, 1):
        raise ValueError(
            f"{operation} exchanges blocks of a one-dimensional buffer; found shape {data.shape}. What to do: "
            "tf.reshape(data, [-1]), and counts and displacements in elements."
        )
