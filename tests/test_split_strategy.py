"""``hccl.split.api``: what it accepts, and where it cuts. How the segments travel is ``test_segments.py``'s part."""

from __future__ import annotations

import logging
import random
import subprocess
import sys
from typing import Any

import pytest
from caught_messages import settings, warnings_of_package
from pool import Pool

from hccl.split.api import set_split_strategy_by_idx, set_split_strategy_by_size
from npu_device._src.gradients import split_strategy
from npu_device._src.gradients.split_strategy import WORLD_GROUP, segment_result, segments

SETTERS = (set_split_strategy_by_idx, set_split_strategy_by_size)
GOOD = {set_split_strategy_by_idx: [1, 19], set_split_strategy_by_size: [60, 40]}

RESNET = """4096 8257536 8704 8704 4194304 2560 2560 9437184 2560 2560 4194304 8704 8704 4194304 2560 2560 9437184 2560
2560 4194304 8704 8704 8388608 4194304 2560 2560 9437184 2560 2560 2097152"""
A = [int(size) for size in RESNET.split()]


@pytest.fixture(autouse=True)
def _forget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split_strategy, "_strategies", {})


@pytest.mark.parametrize(
    ("sizes", "percentages", "ends"),
    [
        ([1] * 20, None, [18, 19]),
        ([1] * 20, [1, 59, 40], [0, 11, 19]),
        ([1] * 20, [90, 1, 9], [17, 18, 19]),
        (A, [20, 40, 40], [6, 18, 29]),
        (A, None, [25, 29]),
        ([1] * 20, [90, 8, 2], [17, 19]),
        ([1] * 160, None, [153, 159]),
        ([1, 2, 3, 4], [25, 25, 25, 25], [0, 2, 3]),
        ([7, 1, 1, 1], [10, 90], [0, 3]),
        ([1] * 5, None, [4]),
        ([1] * 20, [33.3, 33.3, 33.4], [5, 12, 19]),
        ([1] * 20, [0, 100], [0, 19]),
    ],
)
def test_vectors_of_ascend(
    sizes: list[int], percentages: list[float] | None, ends: list[int]
) -> None:
    if percentages is not None:
        set_split_strategy_by_size(percentages)
    for unit in (1, 100, 1024, 1_000_003):
        assert segments([size * unit for size in sizes], WORLD_GROUP) == ends, unit


@pytest.mark.parametrize("with_sizes", [False, True])
def test_the_last_number_has_to_fit(with_sizes: bool) -> None:
    set_split_strategy_by_idx(idxList=[3, 18])
    assert segments(list(range(19)), WORLD_GROUP) == [3, 18]
    assert segments([1], WORLD_GROUP) == [0]
    if with_sizes:
        set_split_strategy_by_size(dataSizeList=[50, 50])
    with pytest.raises(
        ValueError,
        match=r"(?s)last entry is 18; expected 19, .*\(20\) less one.*end idxList with 19",
    ):
        segments([1] * 20, WORLD_GROUP)


@pytest.mark.parametrize("setters", [SETTERS, SETTERS[::-1]])
def test_percentages_go_before_numbers_whatever_came_first(setters: Any) -> None:
    for setter in setters:
        setter(GOOD[setter])
    assert segments([1] * 20, WORLD_GROUP) == [11, 19]


def test_a_later_call_wins_in_its_group_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    given = [1, 19]
    with caplog.at_level(logging.INFO, "npu_device"):
        set_split_strategy_by_idx(given)
        set_split_strategy_by_idx(given)
        set_split_strategy_by_size([50, 50], "b" * 127)
        assert not caplog.records
        set_split_strategy_by_idx([2, 19])
    assert "from [1, 19] to [2, 19]" in caplog.text
    set_split_strategy_by_idx(given, group="a")
    given.append(7)  # later changes of the list don't count
    for group, ends in (
        (WORLD_GROUP, [2, 19]),
        ("a", [1, 19]),
        ("b" * 127, [9, 19]),
        ("c", [18, 19]),
    ):
        assert segments([1] * 20, group) == ends
        segments([1] * 20, group).append(7)
        assert segments([1] * 20, group) == ends


REFUSED = {
    set_split_strategy_by_size: [
        ([33.3] * 3, "expected exactly 100"),
        ([], "isn't empty"),
        ((50, 50), "expected a list"),
        ([-1, 101], r"dataSizeList\[0\] is -1"),
        ([float("nan"), 100], r"dataSizeList\[0\] is nan"),
        (["100"], r"dataSizeList\[0\] is '100'"),
        ([12] * 8 + [4], "9 entries; expected at most 8"),
    ],
    set_split_strategy_by_idx: [
        ([], "isn't empty"),
        (range(3), "expected a list"),
        ([-1, 3], r"idxList\[0\] is -1"),
        ([1, 2**32], r"idxList\[1\] is 4294967296"),
        ([1.0], r"idxList\[0\] is 1\.0"),
        ([3, 8, 5], r"idxList\[2\] is 5, after 8; .* strictly"),
        (list(range(9)), "9 entries; expected at most 8"),
    ],
}


@pytest.mark.parametrize("setter", SETTERS)
def test_what_is_refused_changes_nothing(setter: Any) -> None:
    setter(GOOD[setter])
    before = segments([1] * 20, WORLD_GROUP)
    for argument, says in REFUSED[setter]:
        with pytest.raises(ValueError, match=says):
            setter(argument)
    for group in ("", "x" * 128, "é" * 64, 5, None, ["a"]):
        with pytest.raises(ValueError, match="1 to 127 bytes"):
            setter(GOOD[setter], group)
    assert segments([1] * 20, WORLD_GROUP) == before


def test_the_log_line() -> None:
    assert segment_result([107, 159]) == "segment result: 2 segments [0,107] [108,159]"
    assert segment_result([0]) == "segment result: 1 segment [0,0]"


def test_ends_ascend_and_reach_the_last_gradient() -> None:
    """For sizes as models have them; for equal ones, empty ones, and tiny ones after huge ones."""
    chance = random.Random(1)
    for _ in range(500):
        some = [int(10 ** chance.uniform(0, 8)) for _ in range(chance.randint(1, 200))]
        sizes = chance.choice([some, [10**9] * 3 + some, [0, 0, 4], [4] * 160])
        percentages = chance.choice([None, [100], [0, 100], [1, 59, 40], [90, 0, 8, 2], [12.5] * 8])
        split_strategy.forget_strategies()
        if percentages:
            set_split_strategy_by_size(percentages)
        ends = segments(sizes, WORLD_GROUP)
        drawn = f"{sizes} {percentages}"
        assert ends == sorted(set(ends)) and ends[0] >= 0 and ends[-1] == len(sizes) - 1, drawn
        shares = percentages or [96.54, 3.46]  # Ascend's
        assert len(ends) <= len(shares), drawn


def test_needs_neither_tensorflow_nor_an_open_device() -> None:
    script = """
import sys
from hccl.split.api import set_split_strategy_by_idx, set_split_strategy_by_size
set_split_strategy_by_idx([1, 2]); set_split_strategy_by_size([100])
sys.exit("tensorflow" in sys.modules)
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def cut_with(choice: str, sizes: list[int]) -> tuple[list[list[int]], list[str]]:
    """The segments of a list of float32 gradients of these lengths, and the warnings about them."""
    import tensorflow as tf

    from npu_device._src.gradients.segments import FirstOrders, cut

    with warnings_of_package() as warnings, settings(NPU_DEVICE_SPLIT=choice):
        # Eager tensors that were made in the order of the list count from its end.
        return cut(
            FirstOrders(), [tf.zeros([size]) for size in sizes], "sum", 1, "hccl_world_group"
        ), warnings


def from_the_environment() -> dict[str, Any]:
    found = {
        "fits": cut_with("[1, 3, 5]", [8] * 6),
        "other": cut_with("1,3,5", [8] * 5),
        "short": cut_with("1,3", [8]),
    }
    found |= {"percentages": cut_with("50%, 50%", [8] * 6), "auto": cut_with("auto", [8] * 5)}
    set_split_strategy_by_size([50, 50])
    found["own"] = cut_with("1,3,5", [8] * 6)
    split_strategy.forget_strategies()
    return found


def test_the_split_from_the_environment(single: Pool) -> None:
    (found,) = single.run(from_the_environment)
    assert found["fits"] == ([[5, 4], [3, 2], [1, 0]], [])
    segments, (warning,) = found["other"]
    assert sum(map(len, segments)) == 5
    assert segments[0] == [4, 3, 2, 1, 0][: len(segments[0])]
    assert "its last number has to be 4" in warning
    assert found["short"] == ([[0]], [])
    assert found["percentages"] == ([[5, 4, 3], [2, 1, 0]], [])
    assert found["own"] == found["percentages"]
    assert found["auto"][0] == segments and "saved splits are gone" in found["auto"][1][0]
