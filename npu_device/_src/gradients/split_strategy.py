"""The gradient split strategy: where a list of gradients, in the order of their production, is cut into segments.

Imports no TensorFlow: a script can set its strategy before anything else. Source: Ascend's ``hccl.split.api``.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from npu_device._src import environment
from npu_device._src.collectives.group import WORLD_GROUP, check_group_name
from npu_device._src.wording import counted

MAX_SEGMENTS = 8
_MAX_INDEX = 2**32 - 1
_CLOSE = np.float32(1e-6)
# Ascend's default for the first segment, in per cent; it suits ResNet-50 there.
_DEFAULT_PERCENTAGE = 96.54

_log = logging.getLogger("npu_device")
_INDEX_PARAMETER = "idxList"
_SIZE_PARAMETER = "dataSizeList"
_strategies: dict[tuple[str, str], list] = {}
"""By parameter and group: what the script has set."""
# Shorter lists are metrics and the like, not a model's gradients; they need no message.
_FEWEST_GRADIENTS = 4


def set_by_idx(idxList: Any, group: str = WORLD_GROUP) -> None:
    """Cut after the gradients of these numbers, counted in the order in which backward produces them.

    Args:
        idxList: list of 1 to 8 whole numbers, strictly ascending: the last gradient of each segment. The last entry has
            to be the number of gradients less one, which is checked when they are known.
        group: name of the group whose reductions are cut so.

    Raises:
        ValueError: any other argument.

    Can be called at any time, even before ``npu.open()``; applies to every function traced, and every eager call made,
    afterwards. A later call replaces an earlier one. Percentages take precedence over numbers. Every rank has to set
    the same.

    >>> set_by_idx([20, 100, 159])  # 160 gradients: 0 to 20, 21 to 100, 101 to 159
    """
    check_group_name(group)
    _check_list(_INDEX_PARAMETER, idxList)
    for position, index in enumerate(idxList):
        if not isinstance(index, int) or not 0 <= index <= _MAX_INDEX:
            raise ValueError(
                f"idxList[{position}] is {index!r}; expected a whole number from 0 to {_MAX_INDEX}"
            )
        if position and index <= idxList[position - 1]:
            raise ValueError(
                f"idxList[{position}] is {index}, after {idxList[position - 1]}; expected numbers that ascend strictly"
            )
    _store(_INDEX_PARAMETER, list(idxList), group)


def set_by_size(dataSizeList: Any, group: str = WORLD_GROUP) -> None:
    """Cut so that the segments hold about these percentages of the bytes, in the order in which backward produces them.

    Args:
        dataSizeList: list of 1 to 8 numbers from 0, per cent of the bytes, whose ``sum()`` is exactly 100.
        group: name of the group whose reductions are cut so.

    Raises:
        ValueError: any other argument.

    For when it applies, see ``set_by_idx``.

    >>> set_by_size([60, 20, 20])
    """
    check_group_name(group)
    _check_list(_SIZE_PARAMETER, dataSizeList)
    for position, size in enumerate(dataSizeList):
        if not isinstance(size, (int, float)) or not size >= 0:
            raise ValueError(
                f"dataSizeList[{position}] is {size!r}; expected a number from 0, in per cent of the bytes"
            )
    if sum(dataSizeList) != 100:
        raise ValueError(
            f"dataSizeList {dataSizeList} sums to {sum(dataSizeList)!r}; expected exactly 100 (per cent). Where "
            "fractions don't add up exactly, let the last entry take the rest: [33.3, 33.3, 33.4]."
        )
    _store(_SIZE_PARAMETER, list(dataSizeList), group)


def segments(sizes: Sequence[int], group: str) -> list[int]:
    """Return the last gradient of each segment: by percentages if set, else by numbers if set, else by
    ``NPU_DEVICE_SPLIT``, else 96.54 % and the rest.

    ``sizes`` are bytes in the order of production. A single gradient is one segment, whatever the strategy. Raises
    ValueError if numbers are set, and the last one isn't ``len(sizes) - 1`` (with percentages set as well, too).
    """
    end = len(sizes) - 1
    # A metric or a loss is reduced alone, and a strategy for a model's gradients doesn't fit it.
    if end == 0:
        return [0]
    by_index = _strategies.get((_INDEX_PARAMETER, group))
    if by_index is not None and by_index[-1] != end:
        raise ValueError(
            f"the split strategy idxList={by_index} of group {group!r} doesn't fit the gradients: "
            f"its last entry is {by_index[-1]}; expected {end}, the number of gradients of one "
            f"dtype ({len(sizes)}) less one.\n"
            f"What to do: end idxList with {end}, which the log line with 'segment result' shows when no idxList is "
            "set; or pass fusion=0 or fusion=2 when these aren't the gradients that the strategy is meant for."
        )
    by_size = _strategies.get((_SIZE_PARAMETER, group))
    if by_size is not None:
        return cut_by_size(sizes, by_size)
    if by_index is not None:
        return list(by_index)
    ends = _cut_by_environment(sizes, group)
    if ends is not None:
        return ends
    running = _running_sums(sizes)
    end_of_first = _search(running, _share(_DEFAULT_PERCENTAGE, running[-1]))
    if end_of_first == end:
        return [end]
    return [end_of_first, end]


def _cut_by_environment(sizes: Sequence[int], group: str) -> list[int] | None:
    """Return the last gradient of each segment by ``NPU_DEVICE_SPLIT``; None if it is unset, or doesn't fit."""
    split = environment.NPU_DEVICE_SPLIT.get()
    if split is None:
        return None
    # Percentages replace this value since 0.2.0.
    if split == "auto":
        text = (
            "NPU_DEVICE_SPLIT=auto has no effect any more: saved splits are gone. What to do: set it to the "
            "percentages such as 25%,25%,25%,25%"
        )
    elif isinstance(split[0], float):
        return cut_by_size(sizes, [float(percentage) for percentage in split])
    elif split[-1] == len(sizes) - 1:
        return [int(end) for end in split]
    else:
        text = (
            f"NPU_DEVICE_SPLIT={','.join(map(str, split))} is not applied to {len(sizes)} gradients of one dtype in "
            f"group {group!r}: its last number has to be {len(sizes) - 1}"
        )
    if len(sizes) >= _FEWEST_GRADIENTS:
        log_once(logging.WARNING, text)
    return None


@functools.cache
def log_once(level: int, text: str) -> None:
    # A function is traced many times.
    _log.log(level, "%s", text)


def bounds(ends: Sequence[int]) -> list[tuple[int, int]]:
    """Return the first and the last gradient of each segment, given the last ones."""
    return list(zip([0, *(end + 1 for end in ends)], ends))


def segment_result(ends: Sequence[int]) -> str:
    """Return the log line from which users learn the number of gradients."""
    ranges = " ".join(f"[{low},{high}]" for low, high in bounds(ends))
    return f"segment result: {counted(len(ends), 'segment')} {ranges}"


# Sizes and running sums are 32-bit floats, as they are in Ascend's compiler: the ends depend on their rounding. A share
# is rounded once, at the end: 59 % of 80 has to be 47.2 as closely as 32 bits hold it, or another end is found.


def _running_sums(sizes: Sequence[int]) -> np.ndarray:
    return np.cumsum(np.asarray(sizes, np.float32), dtype=np.float32)


def _share(percentage: float, total: np.float32) -> np.float32:
    return np.float32(percentage / 100 * float(total))


def cut_by_size(sizes: Sequence[int], percentages: Sequence[float]) -> list[int]:
    """Cut at about these percentages of the bytes; return the last gradient of each segment.

    >>> cut_by_size([4] * 20, [25, 25, 50])
    [4, 9, 19]
    """
    running = _running_sums(sizes)
    end_of_all = len(sizes) - 1
    ends: list[int] = []
    placed = np.float32(0)  # bytes in the segments so far
    # Bytes by which these fall short of their goal; negative if they exceed it.
    remainder = np.float32(0)
    for percentage in percentages:
        goal = _share(percentage, running[-1]) + remainder
        while True:
            target = placed + goal
            end = _search(running, target)
            if ends:
                end = max(end, ends[-1] + 1)
            ends.append(end)
            if end == end_of_all:
                return ends
            placed = running[end]
            goal = target - placed
            # A remainder that isn't close to 0 makes a segment of its own.
            if np.float32(sizes[end + 1]) - goal > _CLOSE:
                break
        remainder = goal
    # Gradients that are too small to change the 32-bit sum can be left over; they go into the last segment.
    return [*ends[:-1], end_of_all]


def _search(running: np.ndarray, target: np.float32) -> int:
    """Search by bisection, then take the better of the last probe and its left neighbour, as Ascend does."""
    low = 0
    middle = 0
    high = len(running) - 1
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
    if target - running[middle - 1] <= running[middle] - target:
        return middle - 1
    return middle


def _check_list(name: str, numbers: Any) -> None:
    if not isinstance(numbers, list) or not numbers:
        raise ValueError(f"{name} is {numbers!r}; expected a list that isn't empty")
    if len(numbers) > MAX_SEGMENTS:
        raise ValueError(
            f"{name} has {len(numbers)} entries; expected at most {MAX_SEGMENTS} segments"
        )


def forget_strategies() -> None:
    """Forget what the script has set, as for a script that begins in this process."""
    _strategies.clear()


def _store(name: str, numbers: list, group: str) -> None:
    previous = _strategies.get((name, group))
    if previous is not None and previous != numbers:
        _log.info(
            "the split strategy %s of group %r changes from %s to %s",
            name,
            group,
            previous,
            numbers,
        )
    _strategies[name, group] = numbers
