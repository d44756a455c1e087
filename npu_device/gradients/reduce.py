"""The one road that lists of tensors take to their reduction: cut into segments, one collective each, handed back in
order.

``None`` stays ``None``; ``tf.IndexedSlices`` are ``sparse``'s part.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Optional, Union

import tensorflow as tf

from npu_device.cluster.runtime import Runtime
from npu_device.collectives.agreement import agreed, describe
from npu_device.collectives.all_reduce import REDUCTIONS, all_reduce_segments
from npu_device.collectives.backend import shares_memory
from npu_device.collectives.group import Group
from npu_device.gradients import later_calls
from npu_device.gradients.fusion import check_fusion
from npu_device.gradients.segments import cut
from npu_device.gradients.sparse import reduce_slices
from npu_device.gradients.split_strategy import MAX_SEGMENTS
from npu_device.profiling.steps import traced_reduction

Gradient = Optional[Union[tf.Tensor, tf.IndexedSlices]]

_WIRE_DTYPES = {"fp16": tf.float16, "bf16": tf.bfloat16}


@dataclass(frozen=True)
class Reduction:
    """How a list is reduced.

    Attributes:
        kind: ``"sum"``, ``"mean"``, ``"min"``, ``"max"`` or ``"prod"``.
        fusion: 0 sends each tensor alone, 1 cuts by the split strategy, 2 makes one segment a dtype, in a
            ``tf.function`` of all calls with the same id.
        fusion_id: -1, or with ``fusion=2`` any number from 0.
        overlap: let the first segments travel while backward still makes the others.
        compression: ``"fp16"`` or ``"bf16"`` sends float32 and float64 in 16 bits; ``None`` as they are.

    Raises:
        ValueError: an unknown kind, combination of fusion and fusion_id, or compression.
    """

    kind: str
    fusion: int = 1
    fusion_id: int = -1
    overlap: bool = True
    compression: str | None = None

    def __post_init__(self) -> None:
        if self.kind not in REDUCTIONS:
            raise ValueError(f"reduction {self.kind!r} is unknown; expected one of {', '.join(map(repr, REDUCTIONS))}")
        check_fusion(self.fusion, self.fusion_id)
        if self.compression is not None and self.compression not in _WIRE_DTYPES:
            raise ValueError(f"compression {self.compression!r} is unknown; expected 'fp16', 'bf16' or None")
        if self.compression is not None and self.kind not in ("sum", "mean"):
            raise ValueError(f"compression goes with sum and mean; found reduction {self.kind!r}")

    @property
    def joins_calls(self) -> bool:
        """Whether several calls may be one collective."""
        return self.fusion == 2 and self.kind in ("sum", "mean")

    @property
    def wire(self) -> tf.DType | None:
        """The dtype of float32 and float64 while they travel; None for their own."""
        return None if self.compression is None else _WIRE_DTYPES[self.compression]


def reduce_list(runtime: Runtime, values: Sequence[Gradient], reduction: Reduction, group: Group) -> list[Gradient]:
    """Reduce a list of tensors over a group.

    Args:
        runtime: the running cluster.
        values: dense tensors, ``tf.IndexedSlices`` and ``None``, of the same kinds, shapes and dtypes on every rank;
            ``tf.IndexedSlices`` may have another number of rows on each.
        reduction: how.
        group: the group, of which this rank is a member.

    Returns:
        A list of the same length and order. Each segment's collective depends on that segment's tensors only, so that
        it starts as soon as backward has produced them.

    Raises:
        ValueError: the split strategy doesn't fit; min, max or prod of ``tf.IndexedSlices``.
        TypeError: a dtype that can't be reduced.
        MismatchError: the ranks' calls differ.
    """
    if not (reduction.joins_calls and later_calls.possible()):
        return _reduce_list(runtime, values, reduction, group)

    def reduce(values: Sequence[Gradient], alone: bool) -> list[Gradient]:
        how = replace(reduction, fusion=0) if alone else reduction
        return _reduce_list(runtime, values, how, group)

    return later_calls.reduce_with_earlier_calls(values, (group, reduction), reduce)


def _reduce_list(runtime: Runtime, values: Sequence[Gradient], reduction: Reduction, group: Group) -> list[Gradient]:
    segments = cut(values, reduction.kind, reduction.fusion, group.name)
    call = describe(
        "all_reduce",
        values,
        reduction=reduction.kind,
        segments=_summary(segments),
        compression=reduction.compression or "none",
    )
    results: list[Gradient] = [None] * len(values)
    seen = traced(runtime, values, segments, reduction, group)
    with seen as trace, agreed(runtime, group, call, values), _all_first(values, reduction):
        reduced = all_reduce_segments(
            runtime, [[values[i] for i in positions] for positions in segments], reduction.kind, group, reduction.wire
        )
        for positions, tensors in zip(segments, reduced):
            trace.segment(tensors)
            for position, tensor in zip(positions, tensors):
                results[position] = tensor
        for position, value in enumerate(values):
            if isinstance(value, tf.IndexedSlices):
                results[position] = reduce_slices(runtime, value, reduction.kind, group)
                trace.segment([results[position]])
    return results


def traced(
    runtime: Runtime, values: Sequence[Gradient], segments: Sequence[Sequence[int]], reduction: Reduction, group: Group
) -> contextlib.AbstractContextManager[Any]:
    """What the iteration trace sees of a reduction, see ``profiling.steps``."""
    backend = "shared_memory" if shares_memory(runtime, group) else "tensorflow"
    return traced_reduction(values, segments, reduction.kind, group.name, backend, reduction.overlap)


def _summary(segments: Sequence[Sequence[int]]) -> str:
    """Number and lengths of the segments, and a checksum of what is in them: short, and the same where they are the
    same.
    """
    lengths = "+".join(str(len(positions)) for positions in segments[:MAX_SEGMENTS])
    more = "+…" if len(segments) > MAX_SEGMENTS else ""
    return f"{len(segments)} ({lengths}{more}, order {zlib.crc32(repr(segments).encode()):08x})"


def _all_first(values: Sequence[Gradient], reduction: Reduction) -> Any:
    """Without overlap nothing is sent before everything is there."""
    if reduction.overlap:
        return contextlib.nullcontext()
    return tf.control_dependencies([value for value in values if isinstance(value, tf.Tensor)])
