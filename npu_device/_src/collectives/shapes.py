"""Checks of shapes and ranks before anything is sent; helpers that restore the first dimension; and blocks of different
lengths in a one-dimensional buffer, which are located, cut out and put together.

This module sends nothing.
"""

from __future__ import annotations

from typing import Any, Callable, NamedTuple, Optional, Union

import tensorflow as tf

from npu_device._src.collectives.group import Group

Count = Union[int, tf.Tensor]  # a number that is known while tracing, or an int32 scalar


def require_member(what: str, rank: int, group: Group) -> None:
    """Raise ValueError if a group has no such rank; ``what`` names the argument."""
    if not 0 <= rank < group.size:
        raise ValueError(f"{what} {rank} is not in group {group.name!r}; expected 0 to {group.size - 1}")


def require_first_dimension(operation: str, tensor: tf.Tensor) -> None:
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
    if data.shape.rank not in (None, 1):
        raise ValueError(
            f"{operation} exchanges blocks of a one-dimensional buffer; found shape {data.shape}. What to do: "
            "tf.reshape(data, [-1]), and counts and displacements in elements."
        )


# Blocks


class Blocks(NamedTuple):
    """One block per rank: its elements, and the first one's position in the buffer; int64, shape [number of blocks]."""

    counts: tf.Tensor
    displacements: tf.Tensor


def packed(counts: tf.Tensor) -> Blocks:
    """Return blocks that lie one after the other."""
    return Blocks(counts, tf.cumsum(counts, exclusive=True))


def checked(name: str, counts: Any, displacements: Any, number: int, length: Optional[int] = None) -> Blocks:
    """Check and return the blocks that a caller describes, one per rank. TensorFlow refuses what is known only at run
    time. ``length`` is that of the buffer, if known; None for one that is made to fit: there, no blocks may overlap.
    """
    where, text = f"{name}_displacements", f"{name}_counts and {name}_displacements"
    blocks = Blocks(whole_numbers(f"{name}_counts", counts, [number]), whole_numbers(where, displacements, [number]))
    known = [tf.get_static_value(value) for value in blocks]
    if known[0] is None or known[1] is None:
        return blocks
    end, last = 0, -1
    for start, count, rank in sorted((int(d), int(c), rank) for rank, (c, d) in enumerate(zip(*known)) if c):
        if length is not None and start + count > length:
            raise ValueError(
                f"{text}: the block of rank {rank} ends at element {start + count}, and there are {length}"
            )
        if length is None and start < end:
            raise ValueError(f"{text}: the blocks of rank {last} and rank {rank} overlap at element {start}")
        end, last = start + count, rank
    return blocks


def whole_numbers(name: str, values: Any, shape: list[int]) -> tf.Tensor:
    """Return counts or displacements as int64, none of them negative."""
    tensor = tf.cast(tf.convert_to_tensor(values), tf.int64)
    if not tensor.shape.is_compatible_with(shape):
        raise ValueError(f"{name} has shape {tensor.shape}; expected {tuple(shape)}, one number per rank of the group")
    known = tf.get_static_value(tensor)
    if known is not None and (known < 0).any():
        raise ValueError(f"{name} must not be negative; found {known.tolist()}")
    return tf.ensure_shape(tensor, shape)


def pad_blocks(data: tf.Tensor, blocks: Blocks, longest: tf.Tensor) -> tf.Tensor:
    """Return the blocks of a buffer as rows of equal length, padded with zeros: shape [number of blocks, longest]."""
    rows = []
    for count, start in zip(*map(tf.unstack, blocks)):
        rows.append(tf.pad(tf.slice(data, [start], [count]), [[0, longest - count]]))
    return tf.stack(rows)


def join(rows: tf.Tensor, blocks: Blocks) -> tf.Tensor:
    """Return the buffer made of rows: block i is the beginning of row i. Zeros where there is no block."""
    # Blocks without elements may have any displacement.
    starts = tf.where(blocks.counts == 0, tf.zeros_like(blocks.displacements), blocks.displacements)
    parts, end = [], tf.constant(0, tf.int64)
    for rank in tf.unstack(tf.cast(tf.argsort(starts, stable=True), tf.int64)):
        count = blocks.counts[rank]
        gap = starts[rank] - end
        # If blocks overlap, the gap is negative, and tf.pad refuses it.
        block = tf.slice(rows, [rank, 0], [1, count])[0]
        parts.append(tf.pad(block, [[tf.where(count == 0, tf.zeros_like(gap), gap), 0]]))
        end = tf.where(count == 0, end, starts[rank] + count)
    return tf.concat(parts, axis=0)
