"""Dtypes of the collectives: which can be reduced and moved, which are sent and added in, and which a mean has; and
the reduction of rows, one for each rank, as tensors or as arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any, Optional, Union

import numpy as np
import tensorflow as tf

Tensors = Sequence[tf.Tensor]
TensorList = list[tf.Tensor]  # made for the caller, who may change it
TensorsOrSpecs = Sequence[Union[tf.Tensor, tf.TensorSpec]]
ArrayList = list[np.ndarray]
Count = Union[int, tf.Tensor]  # a number that is known while tracing, or an int32 scalar
Wire = Optional[tf.DType]
"""The dtype in which float32 and float64 tensors are sent; None for their own."""

_FLOATS = (tf.float16, tf.bfloat16, tf.float32, tf.float64)
REDUCED = (
    *_FLOATS,
    tf.int8,
    tf.int16,
    tf.int32,
    tf.int64,
    tf.uint8,
    tf.uint16,
    tf.uint32,
    tf.uint64,
)


def mean_dtype(dtype: tf.DType) -> tf.DType:
    """Return the dtype of a mean, as with ``tf.divide``."""
    if dtype.is_floating:
        return dtype
    # float32 holds all integers of 16 bits exactly.
    if dtype.size < 4:
        return tf.float32
    return tf.float64


def reduced_dtype(dtype: tf.DType, reduction: str) -> tf.DType:
    """Return the dtype of the result of a reduction."""
    if reduction == "mean":
        return mean_dtype(dtype)
    return dtype


def sum_dtype(dtype: tf.DType) -> tf.DType:
    """Return the dtype in which values are added and multiplied: float32 for 16-bit floats, else their own."""
    if dtype.is_floating and dtype.size < 4:
        return tf.float32
    return dtype


def wire_dtype(dtype: tf.DType, compressed: tf.DType | None) -> tf.DType:
    """Return the dtype in which values are sent; compression to ``compressed`` applies to float32 and float64."""
    # A dtype that is as narrow already gains nothing.
    if compressed is None or not dtype.is_floating or dtype.size <= compressed.size:
        return dtype
    return compressed


def wire_scales(reduction: str, counts: Sequence[int]) -> tuple[list[int], int]:
    """Return by what the values of each member are divided before they are sent in 16 bits, and by what the total is.

    Then no sum overflows the 16 bits unless a rank's own values do: shares of a mean are divided by the ranks that they
    come from (the fold divides the total), and shares of a sum by a power of two, which rounds only tiny numbers.
    """
    if reduction == "mean":
        return list(counts), 1
    # Powers of two, by which a division is exact.
    divisor = _power_of_two_from(max(counts))
    return [divisor] * len(counts), _power_of_two_from(sum(counts))


def _power_of_two_from(number: int) -> int:
    """Return the least power of two that isn't below a number."""
    return 1 << (number - 1).bit_length()


def require_bits(dtype: tf.DType) -> None:
    """Raise TypeError for values that don't have a fixed number of bits to move: strings, resources and the like."""
    if not (dtype.is_floating or dtype.is_integer or dtype.is_complex or dtype.is_bool):
        raise TypeError(
            f"a tensor of dtype {dtype.name} can't be sent to another rank; expected a numeric dtype or bool"
        )


_TOTALS = {"sum": tf.add, "mean": tf.add, "prod": tf.multiply}
_CHOICES = {"min": tf.reduce_min, "max": tf.reduce_max}


def fold(rows: Sequence[tf.Tensor], reduction: str) -> tf.Tensor:
    """Return the reduction of rows, one per rank, in order, as the engines on arrays do with numpy. 16-bit floats are
    combined in float32 and rounded once.
    """
    dtype = rows[0].dtype
    if reduction in _CHOICES:
        return _CHOICES[reduction](tf.stack(rows), axis=0)
    dtype = reduced_dtype(dtype, reduction)
    # ``tf.add_n`` and ``tf.reduce_sum`` could add up in another order.
    total = reduce(_TOTALS[reduction], [tf.cast(row, sum_dtype(dtype)) for row in rows])
    if reduction == "mean":
        total = total / len(rows)
    return tf.cast(total, dtype)


Rows = Union[np.ndarray, Sequence[np.ndarray]]

FOLDS: dict[str, Any] = {
    "sum": np.add,
    "mean": np.add,
    "prod": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
}


def fold_arrays(
    rows: Rows,
    output: np.ndarray,
    reduction: str,
    divisor: int,
    shares: Sequence[int],
    total_dtype: np.dtype,
) -> None:
    """Reduce rows, in order, each of which has been divided by its share, into ``output``. A mean is then divided.

    This works in ``total_dtype`` (``total_dtype_of`` the dtype of the result), and rounds once at the end.
    """
    combine = FOLDS[reduction]
    total = output
    if output.dtype != total_dtype:
        total = np.empty(output.shape, total_dtype)
    # Infinite gradients are left to the loss scale; TensorFlow doesn't warn either.
    with np.errstate(all="ignore"):
        if rows[0].dtype == np.float16:
            rows = [widened(row) for row in rows]
        # In most reductions no share is above 1: these need no copy of the rows.
        if max(shares) > 1:
            rows = [
                row if share == 1 else row.astype(output.dtype) * share
                for row, share in zip(rows, shares)
            ]
        if len(rows) == 1:
            total[:] = rows[0]
        else:
            # numpy knows no safe cast of bfloat16.
            combine(rows[0], rows[1], out=total, dtype=total.dtype, casting="unsafe")
        for row in rows[2:]:
            combine(total, row, out=total, dtype=total.dtype, casting="unsafe")
        # A multiplication by the reciprocal gives the bits of the division if the divisor is a power of two.
        if reduction == "mean" and divisor & (divisor - 1) == 0:
            np.multiply(total, total.dtype.type(1.0 / divisor), out=total)
        elif reduction == "mean":
            np.divide(total, divisor, out=total)
        if total is not output:
            convert(total, output)


def convert(values: np.ndarray, target: np.ndarray) -> None:
    """Copy values, rounded to the dtype of the target. The bits are numpy's, in a third of its time for float16."""
    if (values.dtype, target.dtype) == (np.float16, np.float32):
        target[...] = widened(values)
    elif (values.dtype, target.dtype) == (np.float32, np.float16) and len(values) > _FEW:
        target[...] = tf.cast(values, tf.float16)
    else:
        target[...] = values


# Up to this length, calling TensorFlow takes longer than numpy's conversion.
_FEW = 16 << 10

# All float16 numbers in float32, in the order of their bits. numpy converts with one call for each element.
_HALVES = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)


def widened(halves: np.ndarray) -> np.ndarray:
    """Return float16 values in float32."""
    # With the default mode, numpy would check every index.
    return np.take(_HALVES, halves.view(np.uint16), mode="wrap")


def total_dtype_of(dtype: np.dtype) -> np.dtype:
    """Return the dtype in which arrays are combined: float32 for 16-bit floats, else their own."""
    if is_narrow(dtype):
        return np.dtype(np.float32)
    return dtype


def is_narrow(dtype: np.dtype) -> bool:
    # The kind isn't "f" for bfloat16, which numpy sees as bytes.
    return dtype.itemsize == 2 and dtype.kind not in "iu"
