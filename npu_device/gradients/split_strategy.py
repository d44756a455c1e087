"""The gradient split strategy: where a list of gradients, in the order of their production, is cut into segments.

Imports no TensorFlow, so that a script may set its strategy before anything else. Source: Ascend's ``hccl.split.api`` and the
rule by which its compiler applies it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

WORLD_GROUP = "hccl_world_group"
MAX_SEGMENTS = 8
_MAX_GROUP_BYTES = 127
_MAX_INDEX = 2**32 - 1
_DEFAULT = (96.54, 3.46)
"""Percentages that suit ResNet-50 on Ascend."""
_CLOSE = np.float32(1e-6)

_log = logging.getLogger("npu_device")
_by_idx: dict[str, list[int]] = {}
_by_size: dict[str, list[float]] = {}


def set_by_idx(idx_list: Any, group: str = WORLD_GROUP) -> None:
    """Cut after the gradients of these numbers, in the order in which backward produces them.

    Args:
        idx_list: list of 1 to 8 integers, strictly ascending: the last gradient of each segment. The last entry has to be the
            number of gradients less one, which is checked when they are known.
        group: name of the group.

    Raises:
        ValueError: any other argument.
    """
    _check_group(group)
    _check_list("idxList", idx_list)
    for position, index in enumerate(idx_list):
        if not isinstance(index, int) or not 0 <= index <= _MAX_INDEX:
            raise ValueError(f"idxList[{position}] is {index!r}; expected an integer of 0 to {_MAX_INDEX}")
        if position and index <= idx_list[position - 1]:
            raise ValueError(
                f"idxList has to ascend strictly; found {idx_list[position - 1]} before {index} at position {position}"
            )
    _store(_by_idx, "idxList", list(idx_list), group)


def set_by_size(data_size_list: Any, group: str = WORLD_GROUP) -> None:
    """Cut so that the segments hold these percentages of the bytes, in the order in which backward produces them.

    Args:
        data_size_list: list of 1 to 8 numbers from 0 whose sum is 100.
        group: name of the group.

    Raises:
        ValueError: any other argument.
    """
    _check_group(group)
    _check_list("dataSizeList", data_size_list)
    for position, size in enumerate(data_size_list):
        if not isinstance(size, (int, float)) or not size >= 0:
            raise ValueError(f"dataSizeList[{position}] is {size!r}; expected a number from 0, in per cent of the bytes")
    if sum(data_size_list) != 100:
        raise ValueError(f"dataSizeList {data_size_list} sums to {sum(data_size_list)!r}; expected exactly 100 (per cent)")
    _store(_by_size, "dataSizeList", list(data_size_list), group)


def clear() -> None:
    """Forget all strategies; the default counts again."""
    _by_idx.clear()
    _by_size.clear()


def segments(sizes: Sequence[int], group: str) -> list[int]:
    """Where the group's strategy cuts a list of gradients.

    Args:
        sizes: bytes of each gradient, in the order of production; at least one.
        group: name of the group.

    Returns:
        The number of the last gradient of each segment, ascending; the last one is ``len(sizes) - 1``.

    Raises:
        ValueError: the strategy doesn't fit these gradients.
    """
    last = len(sizes) - 1
    by_idx = _by_idx.get(group)
    if by_idx is not None and by_idx[-1] != last:
        raise ValueError(
            f"the split strategy idxList={by_idx} of group {group!r} doesn't fit: its last entry is {by_idx[-1]}, and there are "
            f"{len(sizes)} gradients of this dtype, so that it has to be {last} (their number less one).\n"
            f"What to do: end the list with {last}; the log line with 'segment result' shows the numbers."
        )
    by_size = _by_size.get(group)
    if by_size is not None:
        return _cut_by_size(sizes, by_size)
    return by_idx if by_idx is not None else _cut_by_default(sizes)


def segment_result(ends: Sequence[int]) -> str:
    """The log line by which users find the number of gradients: count and ranges of the segments."""
    starts = [0, *(end + 1 for end in ends[:-1])]
    ranges = " ".join(f"[{start},{end}]" for start, end in zip(starts, ends))
    return f"segment result: {len(ends)} segment(s) {ranges}"


def _cut_by_default(sizes: Sequence[int]) -> list[int]:
    running = np.cumsum(np.asarray(sizes, np.float32), dtype=np.float32)
    last = len(sizes) - 1
    first = _search(running, np.float32(_DEFAULT[0]) / np.float32(100) * running[-1])
    return [first, last] if len(sizes) >= first + 2 else [last]


def _cut_by_size(sizes: Sequence[int], percentages: Sequence[float]) -> list[int]:
    running = np.cumsum(np.asarray(sizes, np.float32), dtype=np.float32)
    last, total = len(sizes) - 1, running[-1]
    ends: list[int] = []
    left = np.float32(0)
    for percentage in percentages:
        goal = np.float32(percentage) / np.float32(100) * total + left
        rest = goal
        while True:
            given = running[ends[-1]] if ends else np.float32(0)
            end = _search(running, given + rest)
            if ends and end <= ends[-1]:
                end = ends[-1] + 1
            if end > last:
                raise ValueError(
                    f"the split strategy dataSizeList={list(percentages)} doesn't fit {len(sizes)} gradients: nothing is left "
                    f"for its later entries.\nWhat to do: give fewer entries."
                )
            ends.append(end)
            rest = rest - (running[end] - given)
            if end == last:
                return ends
            if running[end + 1] - running[end] - rest > _CLOSE:
                break
        left = rest
    # Rounding may leave the last gradients over; none is lost.
    return [*ends[:-1], last]


def _search(running: np.ndarray, target: np.float32) -> int:
    """A plain binary search, and the better of the last probe and its left neighbour; not always the nearest index."""
    low, high, middle = 0, len(running) - 1, 0
    while low <= high:
        middle = (low + high) // 2
        if abs(running[middle] - target) <= _CLOSE:
            return middle
        if running[middle] > target:
            high = middle - 1
        else:
            low = middle + 1
    if middle == 0:
        return 0
    return middle - 1 if target - running[middle - 1] <= running[middle] - target else middle


def _check_group(group: Any) -> None:
    if not isinstance(group, str) or not group or len(group.encode()) > _MAX_GROUP_BYTES:
        raise ValueError(f"group has to be a name of 1 to {_MAX_GROUP_BYTES} bytes; found {group!r}")


def _check_list(name: str, values: Any) -> None:
    if not isinstance(values, list) or not values:
        raise ValueError(f"{name} has to be a list that isn't empty; found {values!r}")
    if len(values) > MAX_SEGMENTS:
        raise ValueError(f"{name} has {len(values)} entries; expected at most {MAX_SEGMENTS} segments")


def _store(strategies: dict[str, Any], name: str, values: list[Any], group: str) -> None:
    before = strategies.get(group)
    if before is not None and before != values:
        _log.info("the split strategy %s of group %r changes from %s to %s", name, group, before, values)
    strategies[group] = values
