"""Cut a list of tensors by the split strategy into segments that travel together, in the order of their production."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from npu_device._src.gradients.order import production_order
from npu_device._src.gradients.split_choice import ends_for
from npu_device._src.gradients.split_strategy import firsts_and_lasts, is_set, segment_result, segments

_log = logging.getLogger("npu_device")
_logged: set[str] = set()


def cut(tensors: Sequence[Any], reduction: str, fusion: int, group: str) -> list[list[int]]:
    """Cut a list of tensors into segments.

    Args:
        tensors: dense tensors, possibly of several dtypes; anything else is left out.
        reduction: the split strategy is for sum and mean; the other reductions use one segment per dtype.
        fusion: 0 gives every tensor a segment of its own, 1 cuts by the split strategy, 2 makes one segment per dtype.
        group: name of the group whose strategy applies.

    Returns:
        Positions in the list, one list per segment. A segment has one dtype. A tensor whose size isn't known before the
        graph runs travels alone; with ``fusion`` 2 the last such one travels with the others.

    Raises:
        ValueError: the strategy doesn't fit the number of gradients.
    """
    buckets: dict[tf.DType, list[int]] = {}
    alone: list[list[int]] = []
    for position, tensor in enumerate(tensors):
        if not isinstance(tensor, tf.Tensor):
            continue
        if fusion == 0 or (fusion == 1 and not tensor.shape.is_fully_defined()):
            alone.append([position])
        else:
            buckets.setdefault(tensor.dtype, []).append(position)
    for positions in buckets.values():
        for position in [position for position in positions if not tensors[position].shape.is_fully_defined()][:-1]:
            positions.remove(position)
            alone.append([position])
    found: list[list[int]] = []
    for dtype, positions in buckets.items():
        if len(positions) == 1:
            found.append(positions)
            continue
        order = [positions[i] for i in production_order([tensors[position] for position in positions])]
        if fusion == 2 or reduction not in ("sum", "mean"):
            found.append(order)
            continue
        sizes = [tensors[position].shape.num_elements() * dtype.size for position in order]
        # The script's own setting takes precedence over the environment.
        ends = (None if is_set(group) else ends_for(sizes, dtype.name, group)) or segments(sizes, group)
        if _log.isEnabledFor(logging.INFO):
            _log_once(f"{segment_result(ends)} of {len(order)} {dtype.name} gradients in group {group!r}")
        found.extend(order[first : last + 1] for first, last in firsts_and_lasts(ends))
    return found + alone


def _log_once(text: str) -> None:
    if text not in _logged:
        _logged.add(text)
        _log.info("%s", text)
