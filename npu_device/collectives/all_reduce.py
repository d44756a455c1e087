"""all_reduce: every rank gets the sum, mean, min, max or product of everybody's tensor."""

from __future__ import annotations

from typing import Any, Callable

import tensorflow as tf

from npu_device.cluster.runtime import Runtime
from npu_device.collectives import shapes
from npu_device.collectives import tensorflow_backend as backend
from npu_device.collectives.agreement import collective
from npu_device.collectives.group import Group

REDUCTIONS = ("sum", "mean", "min", "max", "prod")

# Wider integers carry the narrow ones that TensorFlow's kernels don't take. Sums and products are cut back to the
# narrow dtype afterwards, which wraps around as they would by themselves.
_CARRIERS = {
    tf.int8: tf.int32,
    tf.int16: tf.int32,
    tf.uint8: tf.int32,
    tf.uint16: tf.int32,
    tf.uint32: tf.int64,
}
_DTYPES = (*backend.DTYPES, *_CARRIERS, tf.uint64)


@collective("all_reduce", "tensor", "reduction")
def all_reduce(runtime: Runtime, tensor: tf.Tensor, reduction: str, group: Group) -> tf.Tensor:
    """Reduce one dense tensor over a group.

    Args:
        runtime: the running cluster.
        tensor: any shape, the same on every rank of the group; float16, bfloat16, float32, float64, int8 to int64,
            uint8 to uint64.
        reduction: ``"sum"``, ``"mean"``, ``"min"``, ``"max"`` or ``"prod"``.
        group: the group, of which this rank is a member.

    Returns:
        A tensor of the same shape and dtype; the mean of integers is floating-point (float32 for 8 and 16 bits,
        float64 otherwise), as ``tf.divide`` has it. Sum and mean of floating-point tensors are differentiable: the
        gradient is the sum, or the mean, of everybody's incoming gradient.

    Raises:
        ValueError: another reduction.
        TypeError: a dtype that can't be reduced.
    """
    require_reduction("all_reduce", tensor.dtype, reduction)
    size = group.size
    merge = "sum" if reduction == "mean" else reduction

    def reduce(value: tf.Tensor) -> tf.Tensor:
        return shapes.with_an_element(lambda some: backend.all_reduce(runtime, some, merge, group), value)

    if tensor.dtype.is_floating:
        return _reduce_floating(reduce, tensor, reduction, size)
    if tensor.dtype == tf.uint64:
        reduced = _reduce_uint64(reduce, tensor, merge)
    else:
        reduced = reduce(tf.cast(tensor, _CARRIERS.get(tensor.dtype, tensor.dtype)))
    if reduction == "mean":
        return tf.cast(tf.cast(reduced, tf.float64) / size, mean_dtype(tensor.dtype))
    return tf.cast(reduced, tensor.dtype)


def require_reduction(operation: str, dtype: tf.DType, reduction: str) -> None:
    """Check what is to be reduced, and how.

    Raises:
        ValueError: unknown reduction.
        TypeError: a dtype that can't be reduced.
    """
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction {reduction!r} is unknown; expected one of {', '.join(map(repr, REDUCTIONS))}")
    if dtype not in _DTYPES:
        raise TypeError(
            f"{operation} can't reduce dtype {dtype.name}; expected one of "
            f"{', '.join(dtype.name for dtype in _DTYPES)}. Cast the tensor first."
        )


def mean_dtype(dtype: tf.DType) -> tf.DType:
    """The dtype of a mean, as ``tf.divide`` has it."""
    if dtype.is_floating:
        return dtype
    return tf.float32 if dtype.size < 4 else tf.float64


def _reduce_uint64(reduce: Callable[[tf.Tensor], tf.Tensor], tensor: tf.Tensor, merge: str) -> tf.Tensor:
    """In int64, whose sums and products have the same bits, and whose order is the same with the top bit flipped."""
    flip = tf.int64.min if merge in ("min", "max") else 0
    reduced = reduce(tf.bitwise.bitwise_xor(tf.bitcast(tensor, tf.int64), tf.constant(flip, tf.int64)))
    return tf.bitcast(tf.bitwise.bitwise_xor(reduced, tf.constant(flip, tf.int64)), tf.uint64)


def _reduce_floating(
    reduce: Callable[[tf.Tensor], tf.Tensor], tensor: tf.Tensor, reduction: str, size: int
) -> tf.Tensor:
    def scaled(value: tf.Tensor) -> tf.Tensor:
        reduced = reduce(value)
        return reduced * tf.cast(1.0 / size, value.dtype) if reduction == "mean" else reduced

    @tf.custom_gradient
    def differentiable(value: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], Any]]:
        def gradient(upstream: tf.Tensor) -> tf.Tensor:
            if reduction not in ("sum", "mean"):
                raise LookupError(
                    f"all_reduce has no gradient for reduction {reduction!r}; it is differentiable for 'sum' and 'mean'"
                )
            # Through the same door, so that second derivatives work.
            return _reduce_floating(reduce, upstream, reduction, size)

        return scaled(value), gradient

    return differentiable(tensor)
