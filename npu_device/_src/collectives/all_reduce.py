"""all_reduce: every rank gets the sum, mean, min, max or product of all ranks' tensors."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from npu_device._src.collectives.choice import through_reducing_backend
from npu_device._src.collectives.differentiable import differentiable
from npu_device._src.collectives.dtypes import REDUCED, reduced_dtype, wire_dtype
from npu_device._src.collectives.group import Group
from npu_device._src.collectives.job import Job
from npu_device._src.collectives.operation import Declaration, collective
from npu_device._src.collectives.terms import Agreement

REDUCTIONS = ("sum", "mean", "min", "max", "prod")


def _declare(tensor: tf.Tensor, reduction: str, group: Group) -> Declaration:
    require_reduction("all_reduce", tensor.dtype, reduction)

    def gradient(job: Job, upstream: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        require_differentiable("all_reduce", reduction)
        return [all_reduce(job, upstream[0], reduction, group)]

    return Declaration(
        "all_reduce",
        group,
        [tensor],
        lambda: tf.TensorSpec(tensor.shape, reduced_dtype(tensor.dtype, reduction)),
        {"reduction": reduction},
        gradient=gradient,
    )


@collective(_declare, "tensor")
def all_reduce(agreement: Agreement, tensor: tf.Tensor, reduction: str, group: Group) -> tf.Tensor:
    """Reduce one dense tensor over a group.

    Args:
        agreement: on this call; the caller passes the job.
        tensor: any shape, the same on every rank of the group; float16, bfloat16, float32, float64, int8 to int64,
            uint8 to uint64.
        reduction: ``"sum"``, ``"mean"``, ``"min"``, ``"max"`` or ``"prod"``.
        group: the group, of which this rank is a member.

    Returns:
        A tensor of the same shape and dtype; the mean of integers is floating-point (float32 for 8 and 16 bits,
        float64 otherwise), as with ``tf.divide``. 16-bit floats are combined in float32 and rounded once. Sum and
        mean of floating-point tensors are differentiable: the gradient is the sum, or the mean, of all ranks' incoming
        gradient.

    Raises:
        ValueError: an unknown reduction.
        TypeError: a dtype that can't be reduced.
    """
    [[reduced]] = all_reduce_segments(agreement, [[tensor]], reduction, group, None)
    return reduced


def all_reduce_segments(
    agreement: Agreement, segments: Sequence[Sequence[tf.Tensor]], reduction: str, group: Group, wire: tf.DType | None
) -> list[list[tf.Tensor]]:
    """Reduce segments of tensors on which the ranks have already agreed.

    Args:
        agreement: on this call.
        segments: each of one dtype. Each is reduced as soon as its own tensors are ready.
        reduction: as in ``all_reduce``.
        group: the group, of which this rank is a member.
        wire: dtype in which float32 and float64 are sent, or None. They are added up in their own dtype.

    Returns:
        The results in the same lists, as ``all_reduce`` gives them, and differentiable like those.
    """
    results: list[list[tf.Tensor]] = [[] for _ in segments]
    kinds: dict[tuple[bool, bool], list[int]] = {}
    for place, segment in enumerate(segments):
        dtype = segment[0].dtype
        kinds.setdefault((dtype.is_floating, wire_dtype(dtype, wire) == wire), []).append(place)
    for (_, compressed), places in kinds.items():
        lists = [segments[place] for place in places]
        reduced = _reduce(agreement, lists, reduction, group, wire if compressed else None)
        for place, tensors in zip(places, reduced):
            results[place] = tensors
    return results


def require_reduction(operation: str, dtype: tf.DType, reduction: str) -> None:
    """Raise ValueError for an unknown reduction, and TypeError for a dtype that can't be reduced."""
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction {reduction!r} is unknown; expected one of {', '.join(map(repr, REDUCTIONS))}")
    if dtype not in REDUCED:
        raise TypeError(
            f"{operation} can't reduce dtype {dtype.name}; expected one of "
            f"{', '.join(dtype.name for dtype in REDUCED)}. Cast the tensor first."
        )


def require_differentiable(operation: str, reduction: str) -> None:
    """Raise LookupError if a reduction has no gradient."""
    if reduction not in ("sum", "mean"):
        raise LookupError(
            f"{operation} has no gradient for reduction {reduction!r}; it is differentiable for 'sum' and 'mean'"
        )


def _reduce(
    agreement: Agreement, segments: Sequence[Sequence[tf.Tensor]], reduction: str, group: Group, wire: tf.DType | None
) -> list[list[tf.Tensor]]:
    """Reduce segments that are either all of floating-point dtypes, or all of others."""
    dtype = segments[0][0].dtype
    results = through_reducing_backend(
        agreement, group, dtype, lambda backend, now: backend.all_reduce(now, segments, reduction, group, wire)
    )
    if not dtype.is_floating:
        return results

    def backward(*upstream: tf.Tensor) -> list[tf.Tensor]:
        require_differentiable("all_reduce", reduction)
        # Through the same function, so that second derivatives work.
        return _reduce(Agreement(agreement.job), [upstream], reduction, group, wire)[0]

    # Each segment separately: its results can be used while others are still in progress.
    return [differentiable(result, backward, segment) for result, segment in zip(results, segments)]
