"""all_reduce: every rank gets the sum, mean, min, max or product of everybody's tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Callable

import tensorflow as tf

from npu_device import _compat
from npu_device.cluster.runtime import Runtime
from npu_device.collectives import backend
from npu_device.collectives.agreement import collective
from npu_device.collectives.dtypes import REDUCED
from npu_device.collectives.group import Group

REDUCTIONS = ("sum", "mean", "min", "max", "prod")


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
    [[reduced]] = all_reduce_segments(runtime, [[tensor]], reduction, group, None)
    return reduced


def all_reduce_segments(
    runtime: Runtime, segments: Sequence[Sequence[tf.Tensor]], reduction: str, group: Group, wire: tf.DType | None
) -> list[list[tf.Tensor]]:
    """Reduce segments of tensors; the ranks have agreed on them already.

    Args:
        runtime: the running cluster.
        segments: each of one dtype. Each is reduced as soon as its own tensors are there.
        reduction: as in ``all_reduce``.
        group: the group, of which this rank is a member.
        wire: dtype of float32 and float64 while they travel, or None.

    Returns:
        The results in the same lists, as ``all_reduce`` gives them, and differentiable like those.

    Raises:
        ValueError: another reduction.
        TypeError: a dtype that can't be reduced.
    """
    for segment in segments:
        require_reduction("all_reduce", segment[0].dtype, reduction)
    results: list[list[tf.Tensor]] = [[] for _ in segments]
    for floating in (True, False):
        places = [place for place, segment in enumerate(segments) if segment[0].dtype.is_floating == floating]
        if places:
            lists = [segments[place] for place in places]
            reduced = _reduce(runtime, lists, reduction, group, wire if floating else None)
            for place, tensors in zip(places, reduced):
                results[place] = tensors
    return results


def require_reduction(operation: str, dtype: tf.DType, reduction: str) -> None:
    """Check what is to be reduced, and how.

    Raises:
        ValueError: unknown reduction.
        TypeError: a dtype that can't be reduced.
    """
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction {reduction!r} is unknown; expected one of {', '.join(map(repr, REDUCTIONS))}")
    if dtype not in REDUCED:
        raise TypeError(
            f"{operation} can't reduce dtype {dtype.name}; expected one of "
            f"{', '.join(dtype.name for dtype in REDUCED)}. Cast the tensor first."
        )


def _reduce(
    runtime: Runtime, segments: Sequence[Sequence[tf.Tensor]], reduction: str, group: Group, wire: tf.DType | None
) -> list[list[tf.Tensor]]:
    """Segments that are all of floating-point dtypes, or none."""
    finishes = backend.start_all_reduce(runtime, segments, reduction, group, wire)
    if not segments[0][0].dtype.is_floating or not _compat.may_be_differentiated():
        return [finish() for finish in finishes]

    def differentiable(finish: Callable[[], list[tf.Tensor]], segment: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        @tf.custom_gradient
        def call(*_: tf.Tensor) -> tuple[list[tf.Tensor], Callable[..., Any]]:
            def gradient(*upstream: tf.Tensor) -> list[tf.Tensor]:
                if reduction not in ("sum", "mean"):
                    raise LookupError(
                        f"all_reduce has no gradient for reduction {reduction!r}; it is differentiable for 'sum' and "
                        "'mean'"
                    )
                # Through the same door, so that second derivatives work.
                return _reduce(runtime, [upstream], reduction, group, wire)[0]

            return finish(), gradient

        reduced = call(*segment)
        return list(reduced) if isinstance(reduced, (list, tuple)) else [reduced]

    # Each segment by itself: its results can be used while others are still under way.
    return [differentiable(finish, segment) for finish, segment in zip(finishes, segments)]
